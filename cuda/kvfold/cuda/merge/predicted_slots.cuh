/// Which slots a step may evict next: those that would be evicted first now.
#pragma once

#include "kvfold/cuda/device/block_collectives.cuh"
#include "kvfold/cuda/memory/work_memory.cuh"

namespace kvfold::cuda::detail {

/// A thread's best two of the candidates that it takes. (A third of one thread among a block's best
/// 8 is forgotten: a prediction need not hold.)
struct best_two {
  candidate best = 0, second = 0;

  KVFOLD_DEVICE void take(candidate c) {
    const candidate less = c > best ? best : c;
    best = c > best ? c : best, second = less > second ? less : second;
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
KVFOLD_DEVICE void best_of_block(best_memory<Threads>& shared, best_two mine, Use use) {
  constexpr index_t many = compared_rows, warps = Threads / 32, of_lane = warps * many / 32;
  static_assert(of_lane > 0 && many % of_lane == 0);
  // The lane whose candidate has the highest order takes its turn.
  const auto takes_turn = [](candidate c) {
    const auto order = static_cast<index_t>(static_cast<unsigned>(c >> 32) ^ 0x80000000U);
    return lowest_lane(ballot(order == reduce_max(order))) == lane();
  };
  KVFOLD_ROLLED
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
  KVFOLD_ROLLED
  for (index_t i = 0; i < many; ++i) {
    const candidate c =
        next < of_lane ? shared.listed[(first + next) * warps + lane() % warps] : candidate{0};
    if (takes_turn(c)) {
      use(i, c);
      ++next;
    }
  }
}

}  // namespace kvfold::cuda::detail
