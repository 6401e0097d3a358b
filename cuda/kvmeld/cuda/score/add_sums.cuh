// SPDX-License-Identifier: MIT
/// A prompt's column sums into a policy's scores.
#pragma once

#include "kvmeld/cuda/score/column_scores.cuh"
#include "kvmeld/cuda/score/rule.cuh"

namespace kvmeld::cuda::detail {

/// `s ← age · s + sum` in column 0. Reads 8 bytes a slot, writes 4.
template <class Scalar>
struct add_sums {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  cache_view<Scalar> cache;
  state_view state;
  const float* sums;  // [heads, capacity]
  float age;

  /// Grid: heads, stretches of `threads` slots.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    const index_t s = static_cast<index_t>(block_index().y) * threads + thread_index();
    if (s < cache.length[h]) {
      float& score = context_of(cache, state, h, 0).column(0, s);
      score = score::accumulated(score, sums[cache.slot(h, s)], age);
    }
  }
};

/// Column sums of `queries`, decayed where `options` say so, into column 0, of which `age` remains.
/// `column_scores` and a launch. `sums [heads, capacity]` is scratch.
template <class Scalar>
void add_column_sums(const cache_view<Scalar>& cache, const state_view& state,
                     const query_rows<Scalar>& queries, const column_options& options, float age,
                     float* sums, const column_memory& memory, stream stream) {
  const bool decays = options.decay != 1;
  column_scores(cache, queries, options,
                {.total = decays ? nullptr : sums, .decayed = decays ? sums : nullptr}, memory,
                stream);
  using kernel = add_sums<Scalar>;
  const index_t stretches = (cache.capacity + kernel::threads - 1) / kernel::threads;
  launch(kernel{cache, state, sums, age}, {cache.blocks(), static_cast<unsigned>(stretches)},
         stream);
}

}  // namespace kvmeld::cuda::detail
