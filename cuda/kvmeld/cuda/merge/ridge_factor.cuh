// SPDX-License-Identifier: MIT
/// A ridge's products and their Cholesky factor, tile by tile.
#pragma once

#include "kvmeld/cuda/merge/ridge_system.cuh"

namespace kvmeld::cuda::detail {

/// The tiles of PᵀP and of PᵀY, a block each; or (`Dual`) of PPᵀ.
template <index_t Halves, bool Dual>
struct multiply_rows {
  using tile = tile_product<Halves, Halves, Dual>;
  static constexpr index_t threads = tile::threads, resident = 2;
  struct shared_memory {
    typename tile::ring ring;
  };

  ridge_system of;

  /// A block for every row and column of tiles, those above the diagonal for nothing: as one
  /// number the lower ones would be too many for a grid's second dimension.
  static extent blocks(const ridge_system& of, unsigned heads) {
    return {heads, static_cast<unsigned>(Dual ? of.tiles : of.row_tiles()), blocks_of(of.tiles)};
  }
  /// Grid: heads, rows of tiles, columns of tiles.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = of.active.head(), have = of.tiles_of(h);
    const auto i = block_y(), j = block_z();
    if (j >= have || (i < of.tiles && (j > i || i >= have))) {
      return;
    }
    typename tile::sums sum = {};
    // From a piece to the next, and from a tile to the next.
    const std::ptrdiff_t piece = Dual ? std::ptrdiff_t{of.depth} * tile::depth : tile::depth;
    const std::ptrdiff_t step = Dual ? of.side : std::ptrdiff_t{of.depth} * of.side;
    const half* const left = of.row(h, 0) + i * step;
    const half* const right = of.row(h, 0) + j * step;
    tile::add(
        shared.ring, (Dual ? of.unknown_rows(h) : of.depth) / tile::depth, i == j,
        [&](index_t s, half_rows& a, half_rows& b) {
          a = {left + s * piece, of.depth, of.low()}, b = {right + s * piece, of.depth, of.low()};
        },
        sum);
    tile::store_sums(sum, of.sums(h, i, j));
  }
};

/// Yᵀ as tiles, for the dual.
struct load_outputs {
  using tile = ridge_system::tile;
  static constexpr index_t threads = tile::threads;
  struct shared_memory {};

  ridge_system of;
  const float* y;  // [heads, queries, dim]

  /// Grid: heads, tiles of queries, tiles of columns.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = of.active.head(), j = block_y();
    const auto b = block_z();
    if (of.tiles_of(h) == 0) {
      return;
    }
    tile::sums sum;
    unrolled<4, 4, 4>([&](index_t m, index_t n, index_t u) {
      const index_t e = b * of.side + tile::row(m, u), q = j * of.side + tile::column(n, u);
      sum[m][n][u] = e < of.dim && q < of.queries
                         ? y[(std::ptrdiff_t{h} * of.queries + q) * of.dim + e]
                         : 0.0F;
    });
    tile::store_sums(sum, of.sums(h, of.tiles + b, j));
  }
};

/// Column `j` of tiles, scaled and with ones on the diagonal, less the products of the columns
/// before it. Of the diagonal tile the factor's inverse is made.
struct update_column {
  using tile = ridge_system::tile;
  static constexpr index_t threads = tile::threads, resident = 2;
  struct shared_memory {
    shared_union<tile::ring, tile_cholesky::array> memory;
  };

  ridge_system of;
  index_t j;

  /// Grid: heads, tiles from the diagonal on: it takes longest.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = of.active.head(), have = of.tiles_of(h);
    const index_t i = j + block_y();
    if (j >= have || (i >= have && i < of.tiles)) {
      return;
    }
    constexpr index_t pieces = tile::side / tile::depth;
    tile::sums sum = {};
    const half* const left = of.numbers(h, i, 0);  // tiles of a row lie one behind another
    const half* const right = of.numbers(h, j, 0);
    tile::add(
        shared.memory.first, j * pieces, i == j,
        [&](index_t s, half_rows& a, half_rows& b) {
          const index_t from = s / pieces * 2 * tile::size + s % pieces * tile::depth;
          a = {left + from, tile::side, tile::size};
          b = {right + from, tile::side, tile::size};
        },
        sum);
    const float scale = of.scale[2 * h + (i < of.tiles ? 0 : 1)];
    unrolled<4, 4>([&](index_t m, index_t n) {
      const auto x = tile::load_sums(of.sums(h, i, j), m, n);
      unrolled<4>([&](index_t u) {
        const bool one = i == j && tile::row(m, u) == tile::column(n, u);
        sum[m][n][u] = multiply_add(scale, x[u], (one ? 1.0F : 0.0F) - sum[m][n][u]);
      });
    });
    if (i != j) {
      sync_block();  // all have read what is overwritten
      tile::store_split(sum, of.numbers(h, i, j));
      return;
    }
    auto& a = shared.memory.then;
    unrolled<4, 4, 4>([&](index_t m, index_t n, index_t u) {
      a[tile_cholesky::at(tile::row(m, u), tile::column(n, u))] = sum[m][n][u];
    });
    tile_cholesky::invert_factor(a);
    store(a, of.inverse_of(h, j));
  }

 private:
  KVMELD_DEVICE static void store(const tile_cholesky::array& a, half* to) {
    constexpr index_t packs = tile::side / 8;
    for (index_t e = thread_index(); e < tile::size / 8; e += threads) {
      const index_t r = e / packs, c = e % packs * 8;
      const index_t first = e % 8 / 4 * 4;  // lanes meet different banks
      const auto y = a.vector(tile_cholesky::at(r, c + first));
      const auto z = a.vector(tile_cholesky::at(r, c + 4 - first));
      float x[8];
      unrolled<4>([&](index_t u) {
        x[u] = c + u > r ? 0.0F : first == 0 ? y[u] : z[u];
        x[u + 4] = c + u + 4 > r ? 0.0F : first == 0 ? z[u] : y[u];
      });
      store_halves<2>(x, to + r * tile::side + c, tile::size);
    }
  }
};

/// The factor's tiles below diagonal tile `j`.
struct solve_column {
  using tile = ridge_system::tile;
  static constexpr index_t threads = tile::threads, resident = 2;
  struct shared_memory {
    tile::ring ring;
  };

  ridge_system of;
  index_t j;

  /// Grid: heads, tiles below it.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = of.active.head(), have = of.tiles_of(h);
    const index_t i = j + 1 + block_y();
    if (j >= have || (i >= have && i < of.tiles)) {
      return;
    }
    half* const own = of.numbers(h, i, j);
    const half* const inverse = of.inverse_of(h, j);
    tile::sums sum = {};
    tile::add(
        shared.ring, tile::side / tile::depth, false,
        [&](index_t s, half_rows& a, half_rows& b) {
          a = {own + s * tile::depth, tile::side, tile::size};
          b = {inverse + s * tile::depth, tile::side, tile::size};
        },
        sum);
    tile::store_split(sum, own);
  }
};

}  // namespace kvmeld::cuda::detail
