// SPDX-License-Identifier: MIT
/// Threads that have one thing to do together: a warp, or the whole block.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"

namespace kvmeld::cuda::detail {

/// A warp's lanes.
struct warp_team {
  static constexpr index_t size = 32, warps = 1;

  KVMELD_DEVICE static index_t index() { return lane(); }
  KVMELD_DEVICE static index_t warp() { return 0; }  ///< of the team's
  KVMELD_DEVICE static void sync() { sync_warp(); }
  template <class T>
  KVMELD_DEVICE T sum(T x) const {
    return reduce_sum(x);
  }
  template <class T>
  KVMELD_DEVICE T max(T x) const {
    return reduce_max(x);
  }
};

/// A block's threads. Sums and maxima go through double.
template <index_t Threads>
struct block_team {
  static constexpr index_t size = Threads, warps = Threads / 32;
  of_warps<double, Threads>& shared;

  KVMELD_DEVICE static index_t index() { return thread_index(); }
  KVMELD_DEVICE static index_t warp() { return kvmeld::cuda::warp(); }
  KVMELD_DEVICE static void sync() { sync_block(); }
  template <class T>
  KVMELD_DEVICE T sum(T x) const {
    return static_cast<T>(block_sum(shared, static_cast<double>(x)));
  }
  template <class T>
  KVMELD_DEVICE T max(T x) const {
    return static_cast<T>(block_max(shared, static_cast<double>(x)));
  }
};

}  // namespace kvmeld::cuda::detail
