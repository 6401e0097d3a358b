// SPDX-License-Identifier: MIT
/// A step of heads that a block each attends: one launch.
#pragma once

#include "kvmeld/cuda/merge/observe_and_remove.cuh"
#include "kvmeld/cuda/score/attend_tiles.cuh"

namespace kvmeld::cuda::detail {

/// Attention, then what the second of a step's launches does, by the same block: nothing waits for
/// other blocks. `Observe` begins while attention's first rows are in flight: attention does not
/// write what that asks for.
template <class Attend, class Observe>
struct attend_whole_heads {
  static_assert(Attend::threads == Observe::threads);
  static constexpr index_t threads = Attend::threads, resident = Attend::resident;
  struct shared_memory {
    typename Attend::shared_memory attend;
    typename Observe::shared_memory observe;
  };

  Attend attend;
  Observe observe;

  /// Grid: heads.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    typename Observe::begun known;
    attend(shared.attend, [&] { known = observe.begin(); });
    sync_block();  // logits, maxima and sums are written
    observe.finish(shared.observe, known);
  }
};

}  // namespace kvmeld::cuda::detail
