// SPDX-License-Identifier: MIT
/// A step's third launch: the removed slot merges into the nearest of all others, where attention
/// has not found it.
#pragma once

#include <type_traits>  // std::remove_cvref_t

#include "kvmeld/cuda/device/block_collectives.cuh"
#include "kvmeld/cuda/merge/join_nearest.cuh"
#include "kvmeld/cuda/search/nearest_tile.cuh"

namespace kvmeld::cuda::detail {

/// For the heads whose slot to remove is named: a block takes a tile of a head's slots, whose keys
/// it reads once: the most similar by cosine to the one to remove. The head's last block removes
/// it.
template <class Scalar, class Rule, class Search>
struct remove_into_nearest {
  static constexpr index_t threads = Search::threads, resident = Search::resident;
  struct shared_memory {
    typename Search::shared_memory search;
    of_warps<candidate, threads> best;
    shared_array<index_t, 1> ticket;
  };

  cache_view<Scalar> cache;
  state_view state;
  partial_attention from;
  Rule rule;
  Search search;

  /// Grid: heads, tiles.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    wait_for_previous();
    const index_t h = cache.head();
    const index_t removed = from.victims[h];
    if (removed < 0) {
      return;
    }
    const auto tile = block_y();
    const index_t n = cache.length[h] + 1;
    const auto best = best_of_tiles(
        shared.ticket, shared.best, from.tickets + h, from.best_of(h), tile, from.near_tiles,
        search(shared.search, h, slot_tile::of(tile, from.near_tiles, n - 1, 16), removed,
               [](index_t) { return true; }));
    if (best.last) {  // lengths change when all blocks of the head have read them
      remove_into<threads>(cache, state, context_of(cache, state, h, 0), rule, h, n, removed,
                           best.of, search.aligned);
    }
  }
};

template <class Scalar, class Rule>
void remove_nearest(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                    const partial_attention& of_step, stream stream) {
  with_search<nearest_in_tiles>(
      cache, of_step, [&](const auto& search, const partial_attention& from) {
        using kernel = remove_into_nearest<Scalar, Rule, std::remove_cvref_t<decltype(search)>>;
        launch_early(kernel{cache, state, from, rule, search},
                     {cache.blocks(), blocks_of(from.near_tiles)}, stream);
      });
}

}  // namespace kvmeld::cuda::detail
