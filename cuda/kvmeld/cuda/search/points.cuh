// SPDX-License-Identifier: MIT
/// A head's slots as points: what is clustered, and where its seeds stand.
#pragma once

#include "kvmeld/cuda/memory/head_budgets.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/search/rules.hpp"

namespace kvmeld::cuda::detail {

/// Points of all heads `[heads, capacity]`, whose squared distance is D²: rows of `depth` halfs, a
/// multiple of 64 and at least 128, at multiples of 16 bytes.
struct point_rows {
  half* data;
  float* square;  ///< [heads, capacity] of a row
  index_t capacity, depth;

  /// Of a key and a value of `dim` side by side: each with zeros up to a multiple of 32.
  KVMELD_HD static index_t values_at(index_t dim) { return (dim + 31) / 32 * 32; }
  KVMELD_HD static index_t depth_of(index_t dim) { return dim <= 32 ? 128 : 2 * values_at(dim); }
  KVMELD_DEVICE std::ptrdiff_t at(index_t h, index_t i) const {
    return std::ptrdiff_t{h} * capacity + i;
  }
  KVMELD_DEVICE half* row(index_t h, index_t i) const { return data + at(h, i) * depth; }
};

/// The points of slots, and those of them that are clustered: the slots that are removed.
struct clustered_points {
  point_rows points;
  const float* weight;  ///< [heads, capacity] how much a slot pulls
  keep_evict_partition of;
  active_heads active;

  KVMELD_DEVICE std::ptrdiff_t at(index_t h, index_t i) const { return points.at(h, i); }
};

/// Seeds in rounds of a pool each (`kvmeld::search::pool_seeds`).
struct seed_lists {
  using rounds = kvmeld::search::seed_rounds;

  index_t* slots;  ///< [heads, capacity] in the order of rounds, ascending in each
  float* gain;     ///< [heads, capacity] by place in the list of removed slots; −1: it is a seed
  head_budgets limits;

  /// While `of.kept` are the pinned: how many seeds there are to be, and how many before the
  /// rounds: with nothing pinned the heaviest slot.
  KVMELD_DEVICE index_t count(const keep_evict_partition& of, index_t h) const {
    return limits.of(h).slots - of.kept_count[h];
  }
  KVMELD_DEVICE static index_t before(const keep_evict_partition& of, index_t h) {
    return of.kept_count[h] == 0 ? 1 : 0;
  }
  struct stretch {
    index_t begin, count;
  };
  KVMELD_DEVICE stretch of_round(const keep_evict_partition& of, index_t h, index_t round) const {
    const index_t all = count(of, h), quota = rounds::quota(all);
    const index_t begin = before(of, h) + round * quota, left = all - begin;
    return {begin, left < 0 ? 0 : left < quota ? left : quota};
  }
};

}  // namespace kvmeld::cuda::detail
