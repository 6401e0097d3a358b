// SPDX-License-Identifier: MIT
/// Products of rows that stay in registers with columns that stream past in shared memory.
#pragma once

#include "kvmeld/cuda/memory/column_memory.cuh"
#include "kvmeld/cuda/memory/view.cuh"

namespace kvmeld::cuda::detail {

/// A block of 8 warps holds 256 rows for its whole life, a warp 32 of them as matrix fragments, and
/// streams columns through shared memory, 128 at a time in `stages` tiles. A warp multiplies its
/// rows by `sub` columns at a time, two of these a `turn`. `Scalar` is half or bfloat16, rows are
/// up to `Depth` long.
///
/// Both operands are read 16 bytes a lane: lane `l` has elements `32 j + 8 (l mod 4) ...` of its
/// rows. The products do not care which element is called which, as long as both sides agree. Odd
/// columns swap the halves of 128 bytes, so that the lanes of a load meet different banks.
template <class Scalar, index_t Depth>
struct stream_shape {
  static constexpr index_t warps = 8, threads = 32 * warps, stages = 2;
  static constexpr index_t row_tiles = 2, column_tiles = 4;  // of 16 and of 8, in one product
  static constexpr index_t warp_rows = 16 * row_tiles, rows = warps * warp_rows;
  static constexpr index_t sub = 8 * column_tiles, turn = 2 * sub;
  static constexpr index_t columns = stream_columns_a_tile;
  static constexpr index_t steps = Depth / 32, pieces = row_tiles * column_tiles;
  static_assert(sizeof(Scalar) == 2 && rows == stream_rows && columns % turn == 0 &&
                columns <= threads && Depth % 64 == 0);

  using tile_array = shared_array<Scalar, stages * columns * Depth>;
  /// A lane's part: element `[m][n][i]` is of `row(m, i)` and `column(n, i)`.
  using products = float[row_tiles][column_tiles][4];
  using fragments = unsigned[row_tiles][steps][2][4];

  /// Of the block's rows.
  KVMELD_DEVICE static index_t row(index_t m, index_t i) {
    return warp() * warp_rows + m * 16 + (i >= 2 ? 8 : 0) + lane() / 4;
  }
  /// Of a product's columns.
  KVMELD_DEVICE static index_t column(index_t n, index_t i) {
    return n * 8 + lane() % 4 * 2 + (i & 1);
  }

  /// Every product becomes `of(itself, its row, its column)`.
  template <class Of>
  KVMELD_DEVICE static void each(products& x, Of of) {
    unrolled<row_tiles, column_tiles, 4>([&](index_t m, index_t n, index_t i) {
      x[m][n][i] = of(x[m][n][i], row(m, i), column(n, i));
    });
  }
  KVMELD_DEVICE static void fill(products& x, float value) {
    each(x, [value](float, index_t, index_t) { return value; });
  }

  /// This lane's part of a row `[dim]`, half `i` of row tile `m`; null: zeros.
  KVMELD_DEVICE static void hold(fragments& a, index_t m, index_t i, const Scalar* from,
                                 index_t dim) {
    KVMELD_UNROLL
    for (index_t j = 0; j < steps; ++j) {
      const index_t k = 32 * j + lane() % 4 * 8;
      vector_16<unsigned> x = {};
      if (from != nullptr && k < dim) {
        x = load_words(from + k);
      }
      KVMELD_UNROLL
      for (index_t e = 0; e < 4; ++e) {
        a[m][j][i][e] = x[e];
      }
    }
  }

  /// Copies a tile's columns; `next_row()` gives the rows of this thread one after another, `step`
  /// columns apart, from `first_row()` on.
  static constexpr index_t packs = Depth / 8, step = threads / packs;
  static_assert(step % 16 == 0);
  KVMELD_DEVICE static index_t first_row() { return thread_index() / packs; }
  struct copied {
    const Scalar* row;
    bool is;  ///< not there: zeros
  };
  template <class Next>
  KVMELD_DEVICE static void copy(tile_array& to, index_t stage, index_t dim, Next next_row) {
    const index_t row = first_row(), k = thread_index() % packs * 8;
    const index_t bytes = k < dim ? 16 : 0, at = k < dim ? k : 0;
    const index_t place = (stage * columns + row) * Depth + (k ^ (row % 2 * 32));
    KVMELD_UNROLL
    for (index_t r = 0; r < columns; r += step) {
      const copied next = next_row();
      copy_async(to, place + r * Depth, next.row + at, next.is ? bytes : 0);
    }
  }

  /// `x = rows · columns s0 ... s0 + sub` of a stage. Between the products `between(piece)` is
  /// called once for each of `pieces`: tensor cores and the other units take turns.
  template <class Between>
  KVMELD_DEVICE static void multiply(const fragments& a, const tile_array& tile, index_t stage,
                                     index_t s0, products& x, Between between) {
    fill(x, 0.0F);
    const index_t at = (stage * columns + s0 + lane() / 4) * Depth + lane() % 4 * 8;
    const index_t swap = lane() / 4 % 2;
    KVMELD_UNROLL
    for (index_t j = 0; j < steps; ++j) {
      vector_16<unsigned> b[column_tiles];
      KVMELD_UNROLL
      for (index_t n = 0; n < column_tiles; ++n) {
        b[n] = tile.words(at + n * 8 * Depth + j / 2 * 64 + ((j % 2) ^ swap) * 32);
      }
      KVMELD_UNROLL
      for (index_t side = 0; side < 2; ++side) {
        KVMELD_UNROLL
        for (index_t n = 0; n < column_tiles; ++n) {
          const unsigned right[2] = {b[n][2 * side], b[n][2 * side + 1]};
          KVMELD_UNROLL
          for (index_t m = 0; m < row_tiles; ++m) {
            const auto& f = a[m][j];
            const unsigned left[4] = {f[0][2 * side], f[1][2 * side], f[0][2 * side + 1],
                                      f[1][2 * side + 1]};
            mma_16x8x16<Scalar>(x[m][n], left, right);
          }
        }
        constexpr index_t turns = 2 * steps;
        KVMELD_UNROLL
        for (index_t piece = 0; piece < pieces; ++piece) {
          if (piece * turns / pieces == 2 * j + side) {
            between(piece / column_tiles, piece % column_tiles);
          }
        }
      }
    }
  }
};

/// Queries of a group in one line, 16 by 16: `(i / 16, member, i mod 16)`. So neighbours see the
/// same slots.
struct grouped_queries {
  index_t count;       // of a member
  page_slots members;  // the group, as numbers to divide by

  struct place {
    index_t i, g;  // `i` may be past the count
  };
  /// Places, absent queries included.
  KVMELD_HD index_t size() const { return (count + 15) / 16 * 16 * members.slots; }
  KVMELD_DEVICE place at(index_t n) const {
    const index_t sixteen = n / 16, block = members.page_of(sixteen);
    return {block * 16 + n % 16, sixteen - block * members.slots};
  }
  /// 16 places further.
  KVMELD_DEVICE void advance(place& p) const {
    if (++p.g == members.slots) {
      p.g = 0, p.i += 16;
    }
  }
};

}  // namespace kvmeld::cuda::detail
