// SPDX-License-Identifier: MIT
/// A step's third launch: the removed slot merges into the nearest of all others, where attention
/// has not found it.
#pragma once

#include "kvmeld/cuda/device/last_block.cuh"
#include "kvmeld/cuda/merge/join_nearest.cuh"
#include "kvmeld/cuda/score/attend_splits.cuh"
#include "kvmeld/cuda/score/nearest_in_tiles.cuh"
#include "kvmeld/cuda/search/nearest_tile.cuh"

namespace kvmeld::cuda::detail {

/// A tile of slots by plain products.
template <class Scalar>
struct search_rows {
  static constexpr index_t threads = 512, resident = 2, slots = slots_a_near_tile;
  struct shared_memory {};

  cache_view<Scalar> cache;
  bool aligned;

  /// A thread's nearest of `removed` among slots `tile`.
  KVMELD_DEVICE candidate operator()(shared_memory&, index_t h, const slot_tile& tile,
                                     index_t removed) const {
    candidate best = 0;
    sweep_tile<Scalar, threads>(tile, cache.dim, [&](const tile_rows& rows) {
      float cosine[tile_rows::many];
      cosines(cache.keys.of(h), removed, rows, cache.dim, aligned, cosine);
      KVMELD_UNROLL
      for (index_t u = 0; u < tile_rows::many; ++u) {
        const index_t s = rows.slot(u);
        const candidate c =
            s < rows.end && s != removed ? near_candidate(cosine[u], s) : candidate{0};
        best = c > best ? c : best;
      }
    });
    return best;
  }
};

/// ... on tensor cores, as attention compares them, to the same bits: a prediction decides when a
/// slot's nearest is found, not which it is. Each warp has a ring of tiles of its own.
template <class Scalar, index_t Depth>
struct search_tiles {
  static constexpr index_t warps = Depth > 128 ? 2 : 4, threads = 32 * warps, resident = 3;
  static constexpr index_t slots = slots_a_fast_tile, stages = 3, turn = 16 * warps;
  using rows = warp_tile<Scalar, Depth>;
  using nearest_type = nearest_in_tiles<Scalar, Depth>;
  struct shared_memory {
    shared_array<Scalar, warps * stages * rows::size> tiles;
    shared_array<Scalar, nearest_type::size> removed;  // and zeros
    shared_array<candidate, warps * compared_rows> nearest;
  };

  cache_view<Scalar> cache;
  bool aligned;

  KVMELD_DEVICE candidate operator()(shared_memory& shared, index_t h, const slot_tile& tile,
                                     index_t removed) const {
    const auto keys = cache.keys.of(h);
    const index_t ring = warp() * stages * rows::size, first = tile.begin + warp() * 16;
    nearest_type nearest;
    nearest.begin(shared.removed, cache, h, [&](index_t r) { return r == 0 ? removed : -1; });
    const auto load = [&](index_t stage, index_t s0) {
      if (s0 < tile.end) {
        rows::load(shared.tiles, ring + stage * rows::size, keys, cache.dim, tile.end, s0);
      }
      commit_async();
    };
    KVMELD_UNROLL
    for (index_t i = 0; i < stages - 1; ++i) {
      load(i, first + i * turn);
    }
    wait_async<stages - 1>();
    sync_block();  // the removed slot's key is there
    nearest.measure(shared.removed);
    index_t stage = 0;
    for (index_t s0 = first; s0 < tile.end; s0 += turn) {
      load(stage == 0 ? stages - 1 : stage - 1, s0 + (stages - 1) * turn);
      wait_async<stages - 1>();
      sync_warp();
      typename nearest_type::products x;
      KVMELD_UNROLL
      for (index_t d = 0; d < Depth / 16; ++d) {
        nearest_type::multiply_keys(x, shared.removed, d,
                                    rows::left(shared.tiles, ring + stage * rows::size, d));
      }
      nearest.take_keys(x, s0, tile.end);
      sync_warp();  // the tile may be overwritten
      stage = stage == stages - 1 ? 0 : stage + 1;
    }
    wait_async<0>();
    nearest.write(shared.nearest, warp() * compared_rows);
    sync_warp();
    return shared.nearest[warp() * compared_rows];
  }
};

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
        search(shared.search, h, slot_tile::of(tile, from.near_tiles, n - 1, 16), removed));
    if (best.last) {  // lengths change when all blocks of the head have read them
      remove_into<threads>(cache, state, context_of(cache, state, h, 0), rule, h, n, removed,
                           best.of, search.aligned);
    }
  }
};

template <class Search, class Scalar, class Rule>
void remove_after(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                  partial_attention from, stream stream) {
  from.near_tiles = (cache.capacity + Search::slots - 1) / Search::slots;
  launch_early(remove_into_nearest<Scalar, Rule, Search>{cache, state, from, rule,
                                                         Search{cache, cache.aligned()}},
               {cache.blocks(), blocks_of(from.near_tiles)}, stream);
}
template <class Scalar, class Rule>
void remove_nearest(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                    const partial_attention& from, stream stream) {
  if constexpr (sizeof(Scalar) == 2) {
    if (fits_tiles(cache)) {
      return cache.dim <= 64
                 ? remove_after<search_tiles<Scalar, 64>>(rule, cache, state, from, stream)
             : cache.dim <= 128
                 ? remove_after<search_tiles<Scalar, 128>>(rule, cache, state, from, stream)
                 : remove_after<search_tiles<Scalar, 256>>(rule, cache, state, from, stream);
    }
  }
  remove_after<search_rows<Scalar>>(rule, cache, state, from, stream);
}

}  // namespace kvmeld::cuda::detail
