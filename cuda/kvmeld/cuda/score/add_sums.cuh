// SPDX-License-Identifier: MIT
/// A prompt's column sums into a policy's scores.
#pragma once

#include "kvmeld/cuda/score/column_scores.cuh"
#include "kvmeld/cuda/score/rule.cuh"

namespace kvmeld::cuda::detail {

/// `s ← aging^queries · s + sum` in column 0. Reads 8 bytes a slot, writes 4.
template <class Scalar>
struct add_sums {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  cache_view<Scalar> cache;
  state_view state;
  query_rows<row_number<Scalar>> queries;
  const float* sums;  // [heads, capacity]
  double aging;

  /// Grid: heads, stretches of `threads` slots.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    const index_t s = block_y() * threads + thread_index();
    if (s < cache.length[h]) {
      float& score = context_of(cache, state, h, 0).column(0, s);
      const auto age = static_cast<float>(aging == 1 ? 1 : power(aging, queries.own()));
      score = score::accumulated(score, sums[cache.slot(h, s)], age);
    }
  }
};

/// Column sums of `queries`, decayed where `options` say so, into column 0, which every query ages.
/// `column_scores` and a launch. `sums [heads, capacity]` is scratch.
template <class Scalar>
void add_column_sums(const cache_view<Scalar>& cache, const state_view& state,
                     const query_rows<row_number<Scalar>>& queries, const column_options& options,
                     float aging, float* sums, const column_memory& memory, stream stream) {
  const bool decays = options.decay != 1;
  column_scores(cache, queries, options,
                {.total = decays ? nullptr : sums, .decayed = decays ? sums : nullptr}, memory,
                stream);
  using kernel = add_sums<Scalar>;
  launch(kernel{cache, state, queries, sums, aging},
         {cache.blocks(), blocks_of(cache.capacity, kernel::threads)}, stream);
}

}  // namespace kvmeld::cuda::detail
