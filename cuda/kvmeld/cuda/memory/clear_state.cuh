// SPDX-License-Identifier: MIT
/// A state as it is before anything was observed.
#pragma once

#include "kvmeld/cuda/memory/view.cuh"

namespace kvmeld::cuda::detail {

/// Initial numbers in all columns, zeros in the memory, nothing predicted.
template <class Scalar>
struct clear_state {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  cache_view<Scalar> cache;
  state_view state;

  /// Grid: heads, any number of blocks that share a head.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    const index_t first = block_y() * threads + thread_index();
    const index_t step = grid_y() * threads;
    for (index_t c = 0; c < state.count; ++c) {
      for (index_t s = first; s < cache.stride(); s += step) {
        state.column(c, h)[s] = state.initial[c];
      }
    }
    for (index_t i = first; i < state.floats; i += step) {
      state.memory_of(h)[i] = 0;
    }
    if (state.predicted != nullptr && first < compared_rows) {
      state.predicted_of(h)[first] = -1;
    }
  }
};

}  // namespace kvmeld::cuda::detail
