// SPDX-License-Identifier: MIT
/// KVMerger: runs of consecutive similar keys, and the member that each goes to.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"
#include "kvmeld/cuda/device/block_radix_select.cuh"
#include "kvmeld/cuda/memory/head_budgets.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/score/rule.cuh"

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
/// if none does). `carried`, of the places before the block's, becomes that of all. Returns the
/// runs where the thread's places begin. One barrier; a second call uses the other `turn` (0 or 1).
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
  unrolled<warps>([&](index_t w) {
    const runs_so_far of_warp{shared.ends[turn * warps + w], shared.best[turn * warps + w]};
    carried.add(of_warp);
    if (w < warp()) {
      before.add(of_warp);
    }
  });
  const runs_so_far lower = below(sum, 1);
  if (lane() > 0) {
    before.add(lower);
  }
  return before;
}

/// ε: as many of the most similar pairs join as slots must go (ties to the lower slot), or, with a
/// threshold, all above it if they are more; then every run goes to its member of largest score,
/// ties to the lower slot. A block a head.
template <class Scalar>
struct name_runs {
  static constexpr index_t threads = 512;
  static constexpr index_t own = 8;  // slots of a thread in flight at once
  struct shared_memory {
    radix_select_memory radix;
    of_warps<index_t, threads> number;
    prefix_memory<threads> prefix;
    run_memory<threads> runs;
  };

  cache_view<Scalar> cache;
  state_view state;
  keep_evict_partition of;
  head_budgets limits;
  bool by_threshold;
  float epsilon;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (of.rows[h] < 0) {
      return;
    }
    cut(shared, h, cache.length[h]);
    sync_block();
    name(shared, h, cache.length[h]);
  }

 private:
  KVMELD_DEVICE void cut(shared_memory& shared, index_t h, index_t n) const {
    index_t* const right = of.nearest.into + cache.slot(h, 0);
    const float* const u = of.nearest.similarity + cache.slot(h, 0);
    index_t pairs = 0, above = 0;
    for (index_t s = thread_index(); s < n; s += threads) {
      pairs += right[s] >= 0 ? 1 : 0;
      above += right[s] >= 0 && u[s] > epsilon ? 1 : 0;
    }
    pairs = block_sum(shared.number, pairs), above = block_sum(shared.number, above);
    const index_t surplus = n - limits.of(h).slots;
    const index_t wanted = by_threshold && above > surplus ? above : surplus;
    if (wanted >= pairs) {
      return;
    }
    block_radix_select<threads>::each_but_highest(
        shared.radix, shared.prefix, n, wanted, [&](index_t s) { return right[s] >= 0; },
        [&](index_t s) { return ordered(u[s]); }, [&](index_t s) { right[s] = -1; });
  }

  /// Eight places side by side a thread. A run's members first have its number, then its pivot.
  KVMELD_DEVICE void name(shared_memory& shared, index_t h, index_t n) const {
    const index_t* const order = of.kept + cache.slot(h, 0);
    const index_t* const right = of.nearest.into + cache.slot(h, 0);
    index_t* const into = of.into + cache.slot(h, 0);
    index_t* const pivot = of.removed + cache.slot(h, 0);  // by run
    const head_context head = context_of(cache, state, h, 0);
    runs_so_far carried;
    for (index_t base = 0, turn = 0; base < n; base += threads * own, turn ^= 1) {
      const index_t first = base + thread_index() * own;
      index_t slot[own];
      candidate best[own];
      unrolled<own>([&](index_t u) { slot[u] = first + u < n ? order[first + u] : -1; });
      const index_t previous = first > 0 && first < n ? order[first - 1] : -1;
      unsigned ends = previous < 0 || right[previous] < 0 ? 1U : 0U;  // bit u + 1: place u does
      unrolled<own>([&](index_t u) {
        ends |= slot[u] >= 0 && right[slot[u]] < 0 ? 2U << u : 0U;
        best[u] = slot[u] >= 0 ? most_candidate(ordered(head.column(0, slot[u])), slot[u]) : 0;
      });
      runs_so_far mine;
      unrolled<own>([&](index_t u) {
        mine.best = best[u] > mine.best ? best[u] : mine.best;
        if ((ends >> u & 2U) != 0) {
          ++mine.ended, mine.best = 0;
        }
      });
      runs_so_far at = runs_before(shared.runs, turn, mine, carried);
      unrolled<own>([&](index_t u) {
        at.best = best[u] > at.best ? best[u] : at.best;
        if (slot[u] >= 0 && (ends >> u & 3U) != 3U) {  // more than this slot
          into[slot[u]] = -2 - at.ended;
        }
        if ((ends >> u & 2U) != 0) {
          pivot[at.ended++] = most_slot(at.best), at.best = 0;
        }
      });
    }
    sync_block();
    for (index_t base = thread_index(); base < n; base += threads * own) {
      index_t to[own];
      unrolled<own>([&](index_t u) {
        const index_t s = base + u * threads;
        to[u] = s < n ? into[s] : 0;
      });
      unrolled<own>([&](index_t u) {
        if (to[u] <= -2) {
          into[base + u * threads] = pivot[-2 - to[u]];
        }
      });
    }
  }
};

}  // namespace kvmeld::cuda::detail
