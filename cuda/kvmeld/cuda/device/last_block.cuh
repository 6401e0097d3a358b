// SPDX-License-Identifier: MIT
/// The best candidate of a head's tiles, for the last of its blocks to finish.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"

namespace kvmeld::cuda::detail {

struct best_of_all {
  bool last;     ///< is this the head's last block?
  candidate of;  ///< all tiles; 0: none, or it is not the last
};

/// Writes the block's best to `of_tiles[tile]` and takes a ticket. `*tickets` is 0 before the first
/// block. A head's only block needs neither.
template <index_t Threads>
KVMELD_DEVICE best_of_all best_of_tiles(shared_array<index_t, 1>& ticket,
                                        of_warps<candidate, Threads>& shared, index_t* tickets,
                                        candidate* of_tiles, index_t tile, index_t tiles,
                                        candidate mine) {
  mine = block_max(shared, mine);
  if (tiles == 1) {
    return {true, mine};
  }
  if (thread_index() == 0) {
    of_tiles[tile] = mine;
  }
  thread_fence();
  sync_block();
  if (thread_index() == 0) {
    const index_t done = add_global(tickets, 1);
    ticket[0] = done;
  }
  sync_block();
  thread_fence();
  if (ticket[0] != tiles - 1) {
    return {false, 0};
  }
  candidate best = 0;
  KVMELD_ROLLED
  for (index_t t = thread_index(); t < tiles; t += Threads) {
    best = of_tiles[t] > best ? of_tiles[t] : best;
  }
  return {true, block_max(shared, best)};
}

}  // namespace kvmeld::cuda::detail
