// SPDX-License-Identifier: MIT
/// Runs of places in order that reach over a block's threads, and the best candidate of each.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"

namespace kvmeld::cuda::detail {

template <index_t Threads>
struct run_memory {
  shared_array<candidate, 2 * (Threads / 32)> best;  // of two turns
  shared_array<index_t, 2 * (Threads / 32)> ends;
};

/// What runs are when a thread's places begin, or the block's end: how many have ended, and the
/// best of the one that goes on.
struct runs_so_far {
  index_t ended = 0;
  candidate best = 0;

  KVMELD_DEVICE void add(const runs_so_far& after) {
    best = after.ended > 0 || after.best > best ? after.best : best;
    ended += after.ended;
  }
};

/// `mine`: of a thread's places, how many runs end there, and the best after the last end (of all,
/// if none does). `carried`, of the places before the block's, becomes that of all. Returns what
/// the runs are where the thread's places begin. One barrier; a second call uses the other `turn`
/// (0 or 1).
template <index_t Threads>
KVMELD_DEVICE runs_so_far runs_before(run_memory<Threads>& shared, index_t turn,
                                      const runs_so_far& mine, runs_so_far& carried) {
  constexpr index_t warps = Threads / 32;
  const auto below = [](const runs_so_far& x, index_t d) {
    const index_t from = lane() >= d ? lane() - d : lane();
    return runs_so_far{shuffle(x.ended, from), shuffle(x.best, from)};
  };
  runs_so_far sum = mine;
  for (index_t d = 1; d < 32; d *= 2) {
    runs_so_far lower = below(sum, d);
    if (lane() >= d) {
      lower.add(sum);
      sum = lower;
    }
  }
  if (lane() == 31) {
    shared.ends[turn * warps + warp()] = sum.ended, shared.best[turn * warps + warp()] = sum.best;
  }
  sync_block();
  runs_so_far before = carried;
  KVMELD_UNROLL
  for (index_t w = 0; w < warps; ++w) {
    const runs_so_far of_warp{shared.ends[turn * warps + w], shared.best[turn * warps + w]};
    carried.add(of_warp);
    if (w < warp()) {
      before.add(of_warp);
    }
  }
  const runs_so_far lower = below(sum, 1);
  if (lane() > 0) {
    before.add(lower);
  }
  return before;
}

}  // namespace kvmeld::cuda::detail
