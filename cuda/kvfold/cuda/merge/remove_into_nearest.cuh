/// A step's third launch: the removed slot merges into the nearest of all others.
#pragma once

#include "kvfold/cuda/device/last_block.cuh"
#include "kvfold/cuda/merge/slot_removals.cuh"
#include "kvfold/cuda/search/nearest_tile.cuh"

namespace kvfold::cuda::detail {

/// A block takes a tile of a head's slots, whose keys it reads once: the most similar by cosine to
/// the one to remove. The head's last block merges it into the best of all where
/// `rule.join_nearest` says so, and the newest slot takes its place.
template <class Scalar, class Rule>
struct remove_into_nearest {
  static constexpr index_t threads = 512, resident = 2;
  struct shared_memory {
    of_warps<candidate, threads> best;
    shared_array<index_t, 1> ticket;
  };

  cache_view<Scalar> cache;
  state_view state;
  partial_attention from;
  Rule rule;
  bool aligned;

  /// Grid: heads, tiles.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    wait_for_previous();
    const index_t h = cache.head();
    const auto tile = static_cast<index_t>(block_index().y);
    const index_t removed = from.victims[h];
    if (removed < 0) {
      if (tile == 0 && thread_index() == 0 && cache.length[h] < cache.capacity) {
        count_slots(cache, h, cache.length[h] + 1);
      }
      return;
    }
    const index_t n = cache.length[h] + 1;
    const auto best = best_of_tiles(shared.ticket, shared.best, from.tickets + h, from.best_of(h),
                                    tile, from.near_tiles, nearest(h, tile, n, removed));
    if (best.last) {
      remove(h, n, removed, best.of);  // lengths change when all blocks of the head have read them
    }
  }

 private:
  KVFOLD_DEVICE candidate nearest(index_t h, index_t tile, index_t n, index_t removed) const {
    candidate best = 0;
    sweep_tile<Scalar, threads>(
        slot_tile::of(tile, from.near_tiles, n), cache.dim, [&](const tile_rows& rows) {
          float cosine[tile_rows::many];
          cosines(cache.keys.of(h), removed, rows, cache.dim, aligned, cosine);
          KVFOLD_UNROLL
          for (index_t u = 0; u < tile_rows::many; ++u) {
            const index_t s = rows.slot(u);
            const candidate c =
                s < rows.end && s != removed ? most_candidate(ordered(cosine[u]), s) : candidate{0};
            best = c > best ? c : best;
          }
        });
    return best;
  }

  KVFOLD_DEVICE void remove(index_t h, index_t n, index_t removed, candidate best) const {
    const head_context head = context_of(cache, state, h, 0);
    if (best != 0) {
      const index_t into = most_slot(best);
      const joining how = rule.join_nearest(cache, head, h, into, removed,
                                            number_of(static_cast<unsigned>(best >> 32)));
      if (how.joins) {
        merge_slot<threads>(cache, state, head, h, into, removed, how);
      }
    }
    if (removed != n - 1) {
      move_slot<threads>(cache, state, head, h, removed, n - 1);
    }
    if (thread_index() == 0) {
      count_slots(cache, h, n - 1);
    }
  }
};

template <class Scalar, class Rule>
void remove_nearest(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                    const partial_attention& from, stream stream) {
  launch_early(remove_into_nearest<Scalar, Rule>{cache, state, from, rule, cache.aligned()},
               {cache.blocks(), static_cast<unsigned>(from.near_tiles)}, stream);
}

}  // namespace kvfold::cuda::detail
