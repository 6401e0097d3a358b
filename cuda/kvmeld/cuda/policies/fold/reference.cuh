// SPDX-License-Identifier: MIT
/// fold after a prompt: the reference queries remembered, and the leverage that they give slots.
#pragma once

#include "kvmeld/cuda/device/block_sort.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/policies/fold/queries.cuh"

namespace kvmeld::cuda::detail {

/// Reference queries as `column_scores` takes them: each sees everything.
template <class Scalar>
struct chosen_rows {
  using scalar = Scalar;

  query_rows<Scalar> rows;
  const Scalar* data;
  index_t count;
  const index_t* planned;  // [heads]

  KVMELD_DEVICE const Scalar* at(index_t h, index_t g, index_t i) const { return rows.at(h, g, i); }
  KVMELD_DEVICE index_t position_of(index_t, index_t, index_t) const { return 0x7ffffffe; }
  KVMELD_DEVICE bool asks(index_t h) const { return planned[h] >= 0; }
  KVMELD_DEVICE index_t count_of(index_t) const { return count; }
  KVMELD_DEVICE bool has(index_t i) const { return i < count; }
  KVMELD_DEVICE const chosen_rows& of_block() const { return *this; }
  bool aligned() const { return rows.aligned(); }
};

/// As many of them as there is room for, evenly spread, into fold's memory. A block a head.
template <class Scalar>
struct remember_reference {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  cache_view<Scalar> cache;
  state_view state;
  fold_rule rule;
  query_rows<row_number<Scalar>> queries;

  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    if (cache.length[h] == 0 || rule.queries == 0) {
      return;
    }
    const fold_floats memory = rule.memory_of(cache, state, h);
    const index_t all = queries.own(), n = memory.queries < all ? memory.queries : all;
    const auto place = [&](index_t i) {
      return queries.count - all + static_cast<index_t>(static_cast<long long>(i) * all / n);
    };
    for (index_t e = thread_index(); e < n * cache.group * cache.dim; e += threads) {
      const index_t row = e / cache.dim, g = row % cache.group, i = row / cache.group;
      memory.at(g, i)[e % cache.dim] =
          from_float<bfloat16>(to_float(queries.at(h, g, place(i))[e % cache.dim]));
    }
    for (index_t i = thread_index(); i < n; i += threads) {
      memory.set(memory.position, queries.position_of(h, place(i), cache.next_position[h]), i);
    }
    if (thread_index() == 0) {
      memory.set(memory.held, n), memory.set(memory.newest, n - 1);
      memory.set(memory.next, n % memory.queries), memory.set(memory.steps, 0);
    }
  }
};

/// Leverage averaged over `pool` neighbours in position, and what an outlier's must exceed. A block
/// a head; the lists are scratch.
template <class Scalar>
struct pool_leverage {
  static constexpr index_t threads = 512;
  struct shared_memory {
    sort_memory<threads> sort;
    of_warps<float, threads> sum;
  };

  cache_view<Scalar> cache;
  keep_evict_partition of;
  index_t pool;
  float outlier;
  float* leverage;  // [heads, capacity]
  float* least;     // [heads]

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (of.rows[h] < 0) {
      return;
    }
    const index_t n = cache.length[h];
    const index_t* const position = cache.position_of(h);
    index_t* const list = of.kept + cache.slot(h, 0);
    float* const raw = leverage + cache.slot(h, 0);
    float* const means = of.similarity + cache.slot(h, 0);
    index_t newest = 0;
    for (index_t s = thread_index(); s < n; s += threads) {
      list[s] = s;
      newest = position[s] > newest ? position[s] : newest;
    }
    newest = block_max(shared.sort.number, newest);
    const index_t* const order = block_sort(
        shared.sort, list, of.removed + cache.slot(h, 0), n, static_cast<unsigned>(newest),
        [&](index_t s) { return static_cast<unsigned>(position[s]); });
    float sum = 0;
    for (index_t i = thread_index(); i < n; i += threads) {
      const float mean = pooled(raw, order, n, i, pool);
      means[order[i]] = mean;
      sum += mean;
    }
    sum = block_sum(shared.sum, sum);  // all have read
    for (index_t s = thread_index(); s < n; s += threads) {
      raw[s] = means[s];
    }
    if (thread_index() == 0) {
      least[h] = outlier * (sum / static_cast<float>(n));
    }
  }
};

}  // namespace kvmeld::cuda::detail
