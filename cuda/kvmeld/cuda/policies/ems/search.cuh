// SPDX-License-Identifier: MIT
/// EMS in a step: the centre most like the entry that is removed, among all others.
#pragma once

#include "kvmeld/cuda/memory/work_memory.cuh"
#include "kvmeld/cuda/score/centres_in_tiles.cuh"
#include "kvmeld/cuda/search/nearest_tile.cuh"

namespace kvmeld::cuda::detail {

/// A tile of a head's slots by plain products.
template <class Scalar>
struct search_entry_rows {
  static constexpr index_t threads = 256, resident = 3, slots = slots_a_near_tile;
  struct shared_memory {};

  cache_view<Scalar> cache;
  bool aligned;

  /// A thread's best centre for slot `removed` among slots `tile`; `is_centre(position)`.
  template <class IsCentre>
  KVMELD_DEVICE candidate operator()(shared_memory&, index_t h, const slot_tile& tile,
                                     index_t removed, IsCentre is_centre) const {
    const index_t* const position = cache.position_of(h);
    candidate best = 0;
    sweep_tile<Scalar, threads>(tile, cache.dim, [&](const tile_rows& rows) {
      float keys[tile_rows::many], values[tile_rows::many];
      cosines(cache.keys.of(h), removed, rows, cache.dim, aligned, keys);
      cosines(cache.values.of(h), removed, rows, cache.dim, aligned, values);
      KVMELD_UNROLL
      for (index_t u = 0; u < tile_rows::many; ++u) {
        const index_t s = rows.slot(u);
        const candidate c = s < rows.end && s != removed && is_centre(position[s])
                                ? centre_candidate(keys[u], values[u], position[s])
                                : candidate{0};
        best = c > best ? c : best;
      }
    });
    return best;
  }
};

/// ... on tensor cores, as attention compares them, to the same bits: a prediction decides when an
/// entry's centre is found, not which it is. Each warp has a ring of tiles of its own.
template <class Scalar, index_t Depth>
struct search_entry_tiles {
  static constexpr index_t warps = Depth > 128 ? 2 : 4, threads = 32 * warps, resident = 3;
  static constexpr index_t slots = slots_a_fast_tile, stages = 2, turn = 16 * warps;
  using rows = warp_tile<Scalar, Depth>;
  using compared = centres_in_tiles<Scalar, Depth>;
  struct shared_memory {
    shared_array<Scalar, warps * stages * 2 * rows::size> tiles;
    shared_array<Scalar, compared::size> removed;  // and zeros
    shared_array<candidate, warps * compared_rows> best;
  };

  cache_view<Scalar> cache;
  bool aligned;

  template <class IsCentre>
  KVMELD_DEVICE candidate operator()(shared_memory& shared, index_t h, const slot_tile& tile,
                                     index_t removed, IsCentre is_centre) const {
    const auto keys = cache.keys.of(h), values = cache.values.of(h);
    const index_t ring = warp() * stages * 2 * rows::size, first = tile.begin + warp() * 16;
    compared like;
    like.begin(shared.removed, cache, h, [&](index_t r) { return r == 0 ? removed : -1; });
    const auto load = [&](index_t stage, index_t s0) {
      const index_t at = ring + stage * 2 * rows::size;
      if (s0 < tile.end) {
        rows::load(shared.tiles, at, keys, cache.dim, tile.end, s0);
        rows::load(shared.tiles, at + rows::size, values, cache.dim, tile.end, s0);
      }
      commit_async();
    };
    load(0, first);
    wait_async<stages - 1>();
    sync_block();  // the removed entry is there
    like.measure(shared.removed);
    const auto position_of = [&](index_t s0) {  // of a slot a lane
      const index_t s = s0 + lane() % 16;
      return s < tile.end ? cache.position_of(h)[s] : 0;
    };
    index_t next_position = position_of(first), stage = 0;
    for (index_t s0 = first; s0 < tile.end; s0 += turn, stage ^= 1) {
      const index_t position = next_position, at = ring + stage * 2 * rows::size;
      next_position = position_of(s0 + turn);
      load(stage ^ 1, s0 + turn);
      wait_async<stages - 1>();
      sync_warp();
      typename compared::products of_keys;
      KVMELD_UNROLL
      for (index_t d = 0; d < Depth / 16; ++d) {
        compared::multiply_keys(of_keys, shared.removed, d, rows::left(shared.tiles, at, d));
      }
      like.take_keys(of_keys, s0, tile.end);
      like.take_values(shared.removed, shared.tiles, at + rows::size, s0, tile.end, position,
                       is_centre);
      sync_warp();  // the tile may be overwritten
    }
    wait_async<0>();
    like.write(shared.best, warp() * compared_rows);
    sync_warp();
    return shared.best[warp() * compared_rows];
  }
};

}  // namespace kvmeld::cuda::detail
