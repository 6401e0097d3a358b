/// A prompt's column sums into a policy's scores.
#pragma once

#include "kvfold/cuda/memory/head_context.cuh"

namespace kvfold::cuda::detail {

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
  KVFOLD_DEVICE void operator()(shared_memory&) const {
    const auto h = static_cast<index_t>(block_index().x);
    const index_t s = static_cast<index_t>(block_index().y) * threads + thread_index();
    if (s < cache.length[h]) {
      float& score = context_of(cache, state, h, 0).column(0, s);
      score = accumulated(score, sums[cache.slot(h, s)], age);
    }
  }
};

}  // namespace kvfold::cuda::detail
