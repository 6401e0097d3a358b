// SPDX-License-Identifier: MIT
/// Tiles of rows of halfs in shared memory, and their products by a warp on tensor cores.
#pragma once

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda::detail {

/// Rows of `Depth` halfs or bfloat16s, eight of them a pack of 16 bytes, in an order for which the
/// eight rows of a matrix lie in different banks.
template <index_t Depth>
struct half_tile {
  static_assert(Depth == 32 || Depth % 64 == 0);
  static constexpr index_t depth = Depth, packs = Depth / 8;

  KVMELD_DEVICE static index_t place(index_t row, index_t pack) {
    return row * Depth + (pack ^ (Depth >= 64 ? row & 7 : row >> 1 & 3)) * 8;
  }

  /// Of the tile at `at`, as `mma_16x8x16` takes them: 16 rows, from `row` on, as the left side, or
  /// as two right sides, 8 rows each; elements `16 k ...` of them.
  template <class T, index_t N>
  KVMELD_DEVICE static matrices left(const shared_array<T, N>& shared, index_t at, index_t row,
                                     index_t k) {
    return load_matrices(shared, at + place(row + lane() % 16, k * 2 + lane() / 16));
  }
  template <class T, index_t N>
  KVMELD_DEVICE static matrices right(const shared_array<T, N>& shared, index_t at, index_t row,
                                      index_t k) {
    const index_t r = row + lane() % 8 + lane() / 16 * 8;
    return load_matrices(shared, at + place(r, k * 2 + lane() / 8 % 2));
  }
  /// ... 16 columns, from `column` on, of the rows from `row` on, along which products are summed.
  template <class T, index_t N>
  KVMELD_DEVICE static matrices left_of_columns(const shared_array<T, N>& shared, index_t at,
                                                index_t column, index_t row) {
    const index_t r = row + lane() % 8 + lane() / 16 * 8;
    return load_matrices_transposed(shared, at + place(r, column / 8 + lane() / 8 % 2));
  }
  template <class T, index_t N>
  KVMELD_DEVICE static matrices right_of_columns(const shared_array<T, N>& shared, index_t at,
                                                 index_t column, index_t row) {
    return load_matrices_transposed(shared,
                                    at + place(row + lane() % 16, column / 8 + lane() / 16));
  }
};

/// A warp's sums of products of `16 · RowTiles` rows with `8 · ColumnTiles` others: element
/// `[m][n][i]` is of `row(m, i)` and `column(n, i)`.
template <index_t RowTiles, index_t ColumnTiles>
struct warp_sums {
  static_assert(ColumnTiles % 2 == 0);
  float x[RowTiles][ColumnTiles][4];

  KVMELD_DEVICE static index_t row(index_t m, index_t i) {
    return m * 16 + lane() / 4 + (i >= 2 ? 8 : 0);
  }
  KVMELD_DEVICE static index_t column(index_t n, index_t i) {
    return n * 8 + lane() % 4 * 2 + (i & 1);
  }

  /// `use(element, its row, its column)`.
  template <class Use>
  KVMELD_DEVICE void each(Use use) {
    unrolled<RowTiles, ColumnTiles, 4>(
        [&](index_t m, index_t n, index_t i) { use(x[m][n][i], row(m, i), column(n, i)); });
  }

  /// Adds the products over a tile's depth of the rows from `row0` on of the tile at `a_at` with
  /// those from `column0` on of the tile at `b_at`.
  template <class Tile, class T, index_t N, index_t M>
  KVMELD_DEVICE void add(const shared_array<T, N>& a, index_t a_at, index_t row0,
                         const shared_array<T, M>& b, index_t b_at, index_t column0) {
    KVMELD_UNROLL
    for (index_t k = 0; k < Tile::depth / 16; ++k) {
      add_sixteen<Tile>(x, a, a_at, row0, b, b_at, column0, k);
    }
  }
  /// ... over its elements `16 k ...` alone, to sums `x`.
  template <class Tile, class T, index_t N, index_t M>
  KVMELD_DEVICE static void add_sixteen(float (&x)[RowTiles][ColumnTiles][4],
                                        const shared_array<T, N>& a, index_t a_at, index_t row0,
                                        const shared_array<T, M>& b, index_t b_at, index_t column0,
                                        index_t k) {
    matrices left[RowTiles], right[ColumnTiles / 2];
    KVMELD_UNROLL
    for (index_t m = 0; m < RowTiles; ++m) {
      left[m] = Tile::left(a, a_at, row0 + m * 16, k);
    }
    KVMELD_UNROLL
    for (index_t n = 0; n < ColumnTiles / 2; ++n) {
      right[n] = Tile::right(b, b_at, column0 + n * 16, k);
    }
    KVMELD_UNROLL
    for (index_t n = 0; n < ColumnTiles; ++n) {
      const unsigned columns[2] = {right[n / 2].of[n % 2 * 2], right[n / 2].of[n % 2 * 2 + 1]};
      KVMELD_UNROLL
      for (index_t m = 0; m < RowTiles; ++m) {
        mma_16x8x16<T>(x[m][n], left[m].of, columns);
      }
    }
  }
};

/// `Rows` rows of up to `Depth` elements, for blocks of 4 warps.
template <index_t Depth, index_t Rows = 64>
struct packed_rows : half_tile<Depth> {
  using half_tile<Depth>::packs, half_tile<Depth>::place;
  static constexpr index_t threads = 128, rows = Rows, size = rows * Depth;

  /// Starts to copy elements `first ... dim` of rows `row_of(r)`, zeros behind them and where none
  /// `is`; `row_of` is asked for those too.
  template <class Scalar, index_t N, class RowOf, class Is>
  KVMELD_DEVICE static void copy(shared_array<Scalar, N>& to, index_t at, index_t first,
                                 index_t dim, RowOf row_of, Is is) {
    const index_t pack = thread_index() % packs, i = first + pack * 8;
    const bool inside = i < dim;
    for (index_t r = thread_index() / packs; r < rows; r += threads / packs) {
      copy_async(to, at + place(r, pack), row_of(r) + (inside ? i : 0), inside && is(r) ? 16 : 0);
    }
  }
};

/// `x += left · right` for 16 columns, of which `x` has eight and eight.
template <class Scalar>
KVMELD_DEVICE void add_product(float (&x)[4], float (&y)[4], const unsigned (&left)[4],
                               const matrices& right) {
  const unsigned first[2] = {right.of[0], right.of[1]}, then[2] = {right.of[2], right.of[3]};
  mma_16x8x16<Scalar>(x, left, first);
  mma_16x8x16<Scalar>(y, left, then);
}

}  // namespace kvmeld::cuda::detail
