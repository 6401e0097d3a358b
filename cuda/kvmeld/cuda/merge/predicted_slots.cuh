// SPDX-License-Identifier: MIT
/// Which slots a step may evict next, and what attention has found of those that it was told.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"
#include "kvmeld/cuda/memory/work_memory.cuh"

namespace kvmeld::cuda::detail {

/// A thread's best two of the candidates that it takes. (A third of one thread among a block's best
/// 8 is forgotten: a prediction need not hold.)
struct best_two {
  candidate best = 0, second = 0;

  KVMELD_DEVICE void take(candidate c) {
    const candidate less = c > best ? best : c;
    best = c > best ? c : best, second = less > second ? less : second;
  }
  /// Those that are left when slot `removed` is gone.
  KVMELD_DEVICE void leave_out(index_t removed) {
    if (least_slot(best) == removed) {
      best = second, second = 0;
    } else if (least_slot(second) == removed) {
      second = 0;
    }
  }
};

/// Scratch for `best_of_block`.
template <index_t Threads>
struct best_memory {
  shared_array<candidate, Threads / 32 * compared_rows> listed;
};

/// `use(i, c)`, `i = 0 .. 7`, by a thread of the first warp: the block's best candidates, 0 where
/// there are no more; of equal orders the lower lane's. One barrier: there is to be another between
/// two calls.
template <index_t Threads, class Use>
KVMELD_DEVICE void best_of_block(best_memory<Threads>& shared, best_two mine, Use use) {
  constexpr index_t many = compared_rows, warps = Threads / 32, of_lane = warps * many / 32;
  static_assert(of_lane > 0 && many % of_lane == 0);
  // The lane whose candidate has the highest order takes its turn.
  const auto takes_turn = [](candidate c) {
    const auto order = static_cast<index_t>(static_cast<unsigned>(c >> 32) ^ 0x80000000U);
    return lowest_lane(ballot(order == reduce_max(order))) == lane();
  };
  KVMELD_ROLLED
  for (index_t i = 0; i < many; ++i) {
    if (takes_turn(mine.best)) {
      shared.listed[i * warps + warp()] = mine.best;
      mine.best = mine.second, mine.second = 0;
    }
  }
  sync_block();
  if (warp() != 0) {
    return;
  }
  // A lane has some of a warp's, in order; whichever is next, lanes of a load meet other banks.
  const index_t first = lane() / warps * of_lane;
  index_t next = 0;
  KVMELD_ROLLED
  for (index_t i = 0; i < many; ++i) {
    const candidate c =
        next < of_lane ? shared.listed[(first + next) * warps + lane() % warps] : candidate{0};
    if (takes_turn(c)) {
      use(i, c);
      ++next;
    }
  }
}

/// What attention has found most like slot `removed` of a head's `n`, the step's own token among
/// them; 0: it was not predicted. In every warp.
KVMELD_DEVICE inline candidate found_in_attention(const partial_attention& from, index_t h,
                                                  index_t n, index_t removed) {
  candidate best = 0;
  KVMELD_ROLLED
  for (index_t r = 0; r < compared_rows; ++r) {
    if (from.predicted_slot(h, r, n - 1) == removed) {
      KVMELD_ROLLED
      for (index_t p = lane(); p < from.splits; p += 32) {
        const candidate c = from.nearest_of(p)[r];
        best = c > best ? c : best;
      }
    }
  }
  return reduce_max(best);
}

/// What the next step may evict, of the slots that stay when `removed` is gone, −1: all.
template <index_t Threads>
KVMELD_DEVICE void predict_slots(best_memory<Threads>& shared, const partial_attention& from,
                                 index_t h, index_t n, index_t removed, best_two next) {
  best_of_block(shared, next, [&](index_t i, candidate c) {
    const index_t s = least_slot(c);  // the last slot moves into the removed one's place
    from.predicted_of(h)[i] = removed >= 0 && s == n - 1 ? removed : s;
  });
}

}  // namespace kvmeld::cuda::detail
