// SPDX-License-Identifier: MIT
/// A step's search among all slots for what is most like one: tiles of them, each read once by a
/// block.
#pragma once

#include "kvmeld/cuda/memory/work_memory.cuh"
#include "kvmeld/cuda/score/attend_splits.cuh"
#include "kvmeld/cuda/score/compared_in_tiles.cuh"

namespace kvmeld::cuda::detail {

/// Rows that a warp reads at once: `lanes` lanes share one, and every such group has several.
struct tile_rows {
  static constexpr index_t many = 4;

  index_t base, end;  ///< of the warp's; of the tile
  index_t lanes;

  KVMELD_DEVICE index_t slot(index_t u) const { return base + u * (32 / lanes) + lane() / lanes; }
};

/// `use(rows)` for all rows of a tile, by a block.
template <class Scalar, index_t Threads, class Use>
KVMELD_DEVICE void sweep_tile(const slot_tile& tile, index_t dim, Use use) {
  index_t lanes = 1;
  while (lanes < 32 && lanes * vector_16<Scalar>::size < dim) {
    lanes *= 2;
  }
  const index_t at_once = 32 / lanes * tile_rows::many;
  for (index_t base = tile.begin + warp() * at_once; base < tile.end;
       base += Threads / 32 * at_once) {
    use(tile_rows{base, tile.end, lanes});
  }
}

/// Cosines of row `with` and each of `rows`; 0 when either is zero. All lanes of a warp.
template <class Scalar>
KVMELD_DEVICE void cosines(const head_rows<Scalar>& of, index_t with, const tile_rows& rows,
                           index_t dim, bool aligned, float (&cosine)[tile_rows::many]) {
  constexpr index_t width = vector_16<Scalar>::size, many = tile_rows::many;
  float dot[many] = {}, square[many] = {}, own = 0;
  for (index_t i = lane() % rows.lanes * width; i < dim; i += rows.lanes * width) {
    const auto x = load_row(of.at(with), i, dim, aligned);
    vector_16<Scalar> y[many];
    unrolled<many>([&](index_t u) {
      const index_t s = rows.slot(u);
      y[u] = load_row(of.at(s < rows.end ? s : with), i, dim, aligned);
    });
    unrolled<width>([&](index_t j) {
      const float a = to_float(x[j]);
      own += a * a;
      unrolled<many>([&](index_t u) {
        const float b = to_float(y[u][j]);
        dot[u] += a * b, square[u] += b * b;
      });
    });
  }
  own = square_root(reduce_sum(own, rows.lanes));
  unrolled<many>([&](index_t u) {
    const float norms = own * square_root(reduce_sum(square[u], rows.lanes));
    const float ab = reduce_sum(dot[u], rows.lanes);
    cosine[u] = norms > 0 ? ab / norms : 0.0F;
  });
}

/// A tile of a head's slots by plain products.
template <class Scalar, template <class, index_t> class Compared>
struct search_rows {
  using compared = Compared<Scalar, 64>;
  static constexpr index_t threads = compared::of_values ? 256 : 512;
  static constexpr index_t resident = compared::of_values ? 3 : 2, slots = slots_a_near_tile;
  struct shared_memory {};

  cache_view<Scalar> cache;
  bool aligned;

  /// A thread's best for slot `removed` among slots `tile`, where `Compared` compares values too of
  /// those that `is_centre(position)`.
  template <class IsCentre>
  KVMELD_DEVICE candidate operator()(shared_memory&, index_t h, const slot_tile& tile,
                                     index_t removed, IsCentre is_centre) const {
    const index_t* const position = cache.position_of(h);
    candidate best = 0;
    sweep_tile<Scalar, threads>(tile, cache.dim, [&](const tile_rows& rows) {
      float keys[tile_rows::many], values[tile_rows::many] = {};
      cosines(cache.keys.of(h), removed, rows, cache.dim, aligned, keys);
      if constexpr (compared::of_values) {
        cosines(cache.values.of(h), removed, rows, cache.dim, aligned, values);
      }
      unrolled<tile_rows::many>([&](index_t u) {
        const index_t s = rows.slot(u);
        const bool is = s < rows.end && s != removed;
        const index_t p = compared::of_values && is ? position[s] : 0;
        const candidate c = is && (!compared::of_values || is_centre(p))
                                ? compared::candidate_of(keys[u], values[u], s, p)
                                : candidate{0};
        best = c > best ? c : best;
      });
    });
    return best;
  }
};

/// ... on tensor cores, as attention compares them, to the same bits: a prediction decides when
/// what is most like a slot is found, not which it is. Each warp has a ring of tiles of its own.
template <class Scalar, index_t Depth, template <class, index_t> class Compared>
struct search_tiles {
  using compared = Compared<Scalar, Depth>;
  using rows = warp_tile<Scalar, Depth>;
  static constexpr index_t warps = Depth > 128 ? 2 : 4, threads = 32 * warps, resident = 3;
  static constexpr index_t slots = slots_a_fast_tile, turn = 16 * warps;
  static constexpr index_t stages = compared::of_values ? 2 : 3;
  static constexpr index_t of_stage = rows::size * (compared::of_values ? 2 : 1);
  struct shared_memory {
    shared_array<Scalar, warps * stages * of_stage> tiles;
    shared_array<Scalar, compared::size> removed;  // and zeros
    shared_array<candidate, warps * compared_rows> best;
  };

  cache_view<Scalar> cache;
  bool aligned;

  template <class IsCentre>
  KVMELD_DEVICE candidate operator()(shared_memory& shared, index_t h, const slot_tile& tile,
                                     index_t removed, [[maybe_unused]] IsCentre is_centre) const {
    const auto keys = cache.keys.of(h), values = cache.values.of(h);
    const index_t ring = warp() * stages * of_stage, first = tile.begin + warp() * 16;
    compared like;
    like.begin(shared.removed, cache, h, [&](index_t r) { return r == 0 ? removed : -1; });
    const auto load = [&](index_t stage, index_t s0) {
      const index_t at = ring + stage * of_stage;
      if (s0 < tile.end) {
        rows::load(shared.tiles, at, keys, cache.dim, tile.end, s0);
        if constexpr (compared::of_values) {
          rows::load(shared.tiles, at + rows::size, values, cache.dim, tile.end, s0);
        }
      }
      commit_async();
    };
    unrolled<stages - 1>([&](index_t i) { load(i, first + i * turn); });
    wait_async<stages - 1>();
    sync_block();  // the removed slot is there
    like.measure(shared.removed);
    const auto position_of = [&](index_t s0) {  // of a slot a lane
      const index_t s = s0 + lane() % 16;
      return compared::of_values && s < tile.end ? cache.position_of(h)[s] : 0;
    };
    index_t next_position = position_of(first), stage = 0;
    for (index_t s0 = first; s0 < tile.end; s0 += turn) {
      [[maybe_unused]] const index_t position = next_position;
      const index_t at = ring + stage * of_stage;
      next_position = position_of(s0 + turn);
      load(stage == 0 ? stages - 1 : stage - 1, s0 + (stages - 1) * turn);
      wait_async<stages - 1>();
      sync_warp();
      typename compared::products of_keys;
      unrolled<Depth / 16>([&](index_t d) {
        compared::multiply_keys(of_keys, shared.removed, d, rows::left(shared.tiles, at, d));
      });
      like.take_keys(of_keys, s0, tile.end);
      if constexpr (compared::of_values) {
        like.take_values(shared.removed, shared.tiles, at + rows::size, s0, tile.end, position,
                         is_centre);
      }
      sync_warp();  // the tile may be overwritten
      stage = stage == stages - 1 ? 0 : stage + 1;
    }
    wait_async<0>();
    like.write(shared.best, warp() * compared_rows);
    sync_warp();
    return shared.best[warp() * compared_rows];
  }
};

/// `use(search, from)` for the search that takes the rows of `cache`, and its tiles in `from`.
template <template <class, index_t> class Compared, class Scalar, class Use>
void with_search(const cache_view<Scalar>& cache, partial_attention from, Use use) {
  const auto with = [&](const auto& search) {
    from.near_tiles = (cache.capacity + search.slots - 1) / search.slots;
    use(search, from);
  };
  if constexpr (sizeof(Scalar) == 2) {
    if (fits_tiles(cache)) {
      return with_depth<64, 128, 256>(cache.dim, [&](auto depth) {
        with(search_tiles<Scalar, decltype(depth)::value, Compared>{cache, cache.aligned()});
      });
    }
  }
  with(search_rows<Scalar, Compared>{cache, cache.aligned()});
}

}  // namespace kvmeld::cuda::detail
