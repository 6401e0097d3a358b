// SPDX-License-Identifier: MIT
/// fold: the remembered queries at the positions to come, and their attention.
#pragma once

#include "kvmeld/cuda/policies/fold/rule.cuh"
#include "kvmeld/cuda/score/column_scores.cuh"

namespace kvmeld::cuda::detail {

/// Queries of a plan of fold's: as many as each head has.
struct foreseen_rows {
  const float* data;  // [heads, group, count, pitch]
  index_t count;      // the most
  index_t group, pitch;
  const index_t* planned;  // [heads]
  const float* memory;     // fold's
  std::ptrdiff_t stride;   // floats, head to head

  KVMELD_DEVICE const float* at(index_t h, index_t g, index_t i) const {
    return data + ((std::ptrdiff_t{h} * group + g) * count + i) * pitch;
  }
  KVMELD_DEVICE index_t count_of(index_t h) const {
    return kvmeld::detail::fold_layout{}.held.get(memory + h * stride);
  }
  KVMELD_DEVICE bool asks(index_t h) const { return planned[h] >= 0 && count_of(h) > 0; }
};

/// ... as `column_scores` takes them, and each sees everything: those of the whole group as of one
/// query head, since a tile has room for more than one remembers.
struct foreseen_line {
  using scalar = float;

  foreseen_rows rows;
  const float* data;  // [heads, count, pitch]
  index_t count;      // of the group, the most

  explicit foreseen_line(const foreseen_rows& of)
      : rows(of), data(of.data), count(of.count * of.group) {}
  KVMELD_DEVICE const float* at(index_t h, index_t, index_t i) const {
    return data + (std::ptrdiff_t{h} * count + i) * rows.pitch;
  }
  KVMELD_DEVICE index_t position_of(index_t h, index_t i, index_t) const {
    return i % rows.count < rows.count_of(h) ? 0x7ffffffe : -1;
  }
  KVMELD_DEVICE bool has(index_t i) const { return i < count; }
  KVMELD_DEVICE const foreseen_line& of_block() const { return *this; }
  KVMELD_DEVICE bool asks(index_t h) const { return rows.asks(h); }
  bool aligned() const { return true; }
};

/// The remembered queries, turned to the positions to come.
template <class Scalar>
struct foresee {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  cache_view<Scalar> cache;
  state_view state;
  fold_rule rule;
  foreseen_rows of;
  float* to;  // of `of.data`

  /// Grid: heads, query heads of one.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    const auto g = block_y();
    if (!of.asks(h)) {
      return;
    }
    const fold_floats memory = rule.memory_of(cache, state, h);
    const index_t count = memory.count(), pairs = rope_params::pairs(cache.dim);
    for (index_t e = thread_index(); e < count * pairs; e += threads) {
      const index_t i = e / pairs, slot = memory.slot_of(i);
      const index_t turns =
          cache.next_position[h] + rule.ahead(i, count) - memory.get(memory.position, slot);
      float* const row = to + (of.at(h, g, i) - of.data);
      rule.turn.pair(memory.at(g, slot), cache.dim, e % pairs, turns,
                     [&](index_t j, float x) { row[j] = x; });
    }
  }
};

/// Mass of a slot: the mean probability, with a floor. Without queries, what log-mass says.
template <class Scalar, class Queries>
struct weigh_slots {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  cache_view<Scalar> cache;
  Queries queries;
  float *sum, *mass;  // [heads, capacity]

  /// Grid: heads, stretches of `threads` slots.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    const index_t s = block_y() * threads + thread_index();
    if (queries.planned[h] < 0 || s >= cache.length[h]) {
      return;
    }
    const std::ptrdiff_t at = cache.slot(h, s);
    const index_t count = queries.count_of(h) * cache.group;
    if (count == 0) {
      const float m = cache.log_mass_of(h)[s];
      sum[at] = exponential(m < 80.0F ? m : 80.0F);
    }
    mass[at] = sum[at] / static_cast<float>(count > 1 ? count : 1) + 1e-6F;
  }
};

}  // namespace kvmeld::cuda::detail
