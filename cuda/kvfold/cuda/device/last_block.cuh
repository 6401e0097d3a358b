/// The best of a head's tiles, for whichever of its blocks finishes last.
#pragma once

#include "kvfold/cuda/device/block_collectives.cuh"
#include "kvfold/cuda/memory/work_memory.cuh"

namespace kvfold::cuda::detail {

struct best_of_all {
  bool last;     ///< is this the head's last block?
  candidate of;  ///< all tiles; 0: none, or it is not the last
};

/// Leaves the block's best behind, a tile of `tiles`, and takes a ticket. The tickets are the last
/// block's to put back to 0.
template <index_t Threads>
KVFOLD_DEVICE best_of_all best_of_tiles(shared_array<index_t, 1>& ticket,
                                        of_warps<candidate, Threads>& shared,
                                        const partial_attention& to, index_t h, index_t tile,
                                        index_t tiles, candidate mine) {
  candidate* const of_tiles = to.removed + std::ptrdiff_t{h} * tiles;
  mine = block_max(shared, mine);
  if (thread_index() == 0) {
    of_tiles[tile] = mine;
  }
  thread_fence();
  sync_block();
  if (thread_index() == 0) {
    const index_t done = add_global(to.tickets + h, 1);
    ticket[0] = done;
  }
  sync_block();
  thread_fence();
  if (ticket[0] != tiles - 1) {
    return {false, 0};
  }
  candidate best = 0;
  for (index_t t = thread_index(); t < tiles; t += Threads) {
    best = of_tiles[t] > best ? of_tiles[t] : best;
  }
  return {true, block_max(shared, best)};
}

}  // namespace kvfold::cuda::detail
