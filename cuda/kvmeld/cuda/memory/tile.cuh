// SPDX-License-Identifier: MIT
/// Products of tiles of rows, as prompt scores and similarity search need them: every row of one
/// tile with every row of another, never stored.
#pragma once

#include <type_traits>  // std::is_same_v

#include "kvmeld/cuda/device/half_tile.cuh"
#include "kvmeld/cuda/memory/view.cuh"

namespace kvmeld::cuda {

/// A block of 4 warps multiplies `rows` rows by `columns` others, each up to `Depth` elements long.
/// half and bfloat16 on tensor cores, a warp 32 × 64; float by itself, a warp 16 × 32; of rows
/// above 128 half as many others, so that every card has room for them twice. Packs of 16 bytes lie
/// in an order for which the lanes of a load meet different banks.
template <class Scalar, index_t Depth>
struct tile_shape {
  static constexpr bool matrix = sizeof(Scalar) == 2;
  static constexpr index_t warps = 4, threads = 32 * warps;
  static constexpr index_t row_tiles = matrix ? 2 : 1;  ///< of 16, a warp
  static constexpr index_t column_tiles = (matrix ? 8 : 4) / (Depth > 128 ? 2 : 1);  ///< of 8
  static constexpr index_t rows = warps * row_tiles * 16;
  static constexpr index_t columns = column_tiles * 8;
  static constexpr index_t width = vector_16<Scalar>::size;
  static_assert(Depth % (8 * width) == 0);

  using row_array = shared_array<Scalar, rows * Depth>;
  using column_array = shared_array<Scalar, columns * Depth>;
  /// A lane's part of the products: element `[m][n][i]` is of `row(m, i)` and `column(n, i)`.
  using products = float[row_tiles][column_tiles][4];

  KVMELD_DEVICE static index_t row(index_t m, index_t i) {
    return (warp() * row_tiles + m) * 16 + lane() / 4 + (i >= 2 ? 8 : 0);
  }
  KVMELD_DEVICE static index_t column(index_t n, index_t i) {
    return n * 8 + lane() % 4 * 2 + (i & 1);
  }

  /// Where element `k` of a row lies, the first of a pack or one of it.
  KVMELD_DEVICE static index_t place(index_t row, index_t k) {
    return row * Depth + (k / width ^ (row & 7)) * width + k % width;
  }

  /// Starts to copy `Count` rows `row_of(r)` (null: zeros) `[dim]`, zeros up to a multiple of 16;
  /// to be committed and waited for by the caller. Rows of another scalar become floats, at once.
  template <index_t Count, class RowOf, class From>
  KVMELD_DEVICE static void load(shared_array<Scalar, Count * Depth>& to, RowOf row_of,
                                 const From* anything, index_t dim, bool aligned) {
    if constexpr (!std::is_same_v<From, Scalar>) {
      convert<Count>(to, row_of, anything, dim, aligned);
    } else {
      copy<Count>(to, row_of, anything, dim, aligned);
    }
  }

 private:
  template <index_t Count, class RowOf, class From>
  KVMELD_DEVICE static void convert(shared_array<Scalar, Count * Depth>& to, RowOf row_of,
                                    const From* anything, index_t dim, bool aligned) {
    static_assert(std::is_same_v<Scalar, float>);
    constexpr index_t many = vector_16<From>::size;
    const index_t packs = (dim + 15) / 16 * 16 / many;
    for (index_t e = thread_index(); e < Count * packs; e += threads) {
      const index_t r = e / packs, i = e % packs * many;
      const From* const from = row_of(r);
      const auto x =
          load_row(from == nullptr ? anything : from, from == nullptr ? dim : i, dim, aligned);
      KVMELD_UNROLL
      for (index_t j = 0; j < many; j += width) {
        vector_16<float> y;
        KVMELD_UNROLL
        for (index_t k = 0; k < width; ++k) {
          y[k] = to_float(x[j + k]);
        }
        to.set_vector(place(r, i + j), y);
      }
    }
  }

  template <index_t Count, class RowOf>
  KVMELD_DEVICE static void copy(shared_array<Scalar, Count * Depth>& to, RowOf row_of,
                                 const Scalar* anything, index_t dim, bool aligned) {
    const index_t packs = (dim + 15) / 16 * 16 / width;
    for (index_t e = thread_index(); e < Count * packs; e += threads) {
      const index_t r = e / packs, i = e % packs * width;
      const Scalar* const from = row_of(r);
      if (aligned) {
        const index_t left = from == nullptr || i >= dim ? 0 : dim - i;
        copy_async(to, place(r, i), left == 0 ? anything : from + i,
                   (left < width ? left : width) * static_cast<index_t>(sizeof(Scalar)));
      } else {
        to.set_vector(place(r, i), from == nullptr ? load_row(anything, 0, 0, false)
                                                   : load_row(from, i, dim, false));
      }
    }
  }

 public:
  /// `x[m][n][i] = Σ_k a[row][k] b[column][k]`.
  KVMELD_DEVICE static void multiply(row_array& a, column_array& b, index_t dim, products& x) {
    clear(x);
    accumulate(a, b, dim, x);
  }
  KVMELD_DEVICE static void clear(products& x) {
    unrolled<row_tiles, column_tiles, 4>([&](index_t m, index_t n, index_t i) { x[m][n][i] = 0; });
  }
  KVMELD_DEVICE static void accumulate(row_array& a, column_array& b, index_t dim, products& x) {
    if constexpr (matrix) {
      for (index_t k = 0; k * 16 < dim; ++k) {
        detail::warp_sums<row_tiles, column_tiles>::template add_sixteen<detail::half_tile<Depth>>(
            x, a, 0, row(0, 0) - lane() / 4, b, 0, 0, k);
      }
    } else {
      for (index_t k = 0; k < dim; k += width) {
        vector_16<Scalar> right[column_tiles][2];
        KVMELD_UNROLL
        for (index_t n = 0; n < column_tiles; ++n) {
          right[n][0] = b.vector(place(column(n, 0), k));
          right[n][1] = b.vector(place(column(n, 1), k));
        }
        KVMELD_UNROLL
        for (index_t half_row = 0; half_row < 2; ++half_row) {
          const auto left = a.vector(place(row(0, 2 * half_row), k));
          unrolled<column_tiles, width>([&](index_t n, index_t j) {
            x[0][n][2 * half_row] += left[j] * right[n][0][j];
            x[0][n][2 * half_row + 1] += left[j] * right[n][1][j];
          });
        }
      }
    }
  }
};

}  // namespace kvmeld::cuda
