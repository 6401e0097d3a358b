// SPDX-License-Identifier: MIT
/// One head as rules see it.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"
#include "kvmeld/cuda/memory/view.cuh"

namespace kvmeld::cuda {

/// One head as a rule sees it.
struct head_context {
  const index_t* position;  ///< [capacity]
  const float* log_mass;    ///< [capacity]
  float* columns;
  std::ptrdiff_t stride;  ///< column to column
  float* memory;
  index_t newest;        ///< the latest position
  index_t head;          ///< which one it is
  std::ptrdiff_t first;  ///< its slot 0 in a call's own arrays `[heads, capacity]`

  KVMELD_DEVICE float& column(index_t c, index_t s) const { return columns[c * stride + s]; }
};

template <class Scalar>
KVMELD_DEVICE head_context context_of(const cache_view<Scalar>& cache, const state_view& state,
                                      index_t h, index_t newest) {
  return {cache.position_of(h),
          cache.log_mass_of(h),
          state.columns_of(h),
          state.column_stride,
          state.memory_of(h),
          newest,
          h,
          cache.slot(h, 0)};
}

/// The latest position among a head's `n` slots, by a block.
template <class Scalar, index_t Threads>
KVMELD_DEVICE index_t newest_of(of_warps<index_t, Threads>& shared, const cache_view<Scalar>& cache,
                                index_t h, index_t n) {
  index_t newest = -1;
  for (index_t s = thread_index(); s < n; s += Threads) {
    const index_t p = cache.position_of(h)[s];
    newest = p > newest ? p : newest;
  }
  return block_max(shared, newest);
}

}  // namespace kvmeld::cuda
