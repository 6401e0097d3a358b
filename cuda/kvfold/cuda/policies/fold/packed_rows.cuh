/// Rows of 16-bit elements as tiles in shared memory, for products on tensor cores.
#pragma once

#include "kvfold/cuda/device/device.cuh"

namespace kvfold::cuda::detail {

/// `Rows` rows of up to `Depth` elements, for blocks of 4 warps.
template <index_t Depth, index_t Rows = 64>
struct packed_rows {
  static constexpr index_t threads = 128, rows = Rows, packs = Depth / 8, size = rows * Depth;

  /// Where 16 bytes of a row lie: turned, so that those of 8 rows meet different banks.
  KVFOLD_DEVICE static index_t place(index_t row, index_t pack) {
    return (row * packs + (pack ^ (row & 7))) * 8;
  }
  /// Starts to copy elements `first ... dim` of rows `row_of(r)`, zeros behind them and where none
  /// `is`; `row_of` is asked for those too.
  template <class Scalar, index_t N, class RowOf, class Is>
  KVFOLD_DEVICE static void copy(shared_array<Scalar, N>& to, index_t at, index_t first,
                                 index_t dim, RowOf row_of, Is is) {
    const index_t pack = thread_index() % packs, i = first + pack * 8;
    const bool inside = i < dim;
    for (index_t r = thread_index() / packs; r < rows; r += threads / packs) {
      copy_async(to, at + place(r, pack), row_of(r) + (inside ? i : 0), inside && is(r) ? 16 : 0);
    }
  }
  /// A warp's 16 rows from `row` on and 16 elements from `16 k` on, as the left side of a product.
  template <class Scalar, index_t N>
  KVFOLD_DEVICE static matrices left(const shared_array<Scalar, N>& from, index_t at, index_t row,
                                     index_t k) {
    return load_matrices(from, at + place(row + lane() % 16, k * 2 + lane() / 16));
  }
  /// ... as the right side, whose columns the rows are: the first eight, then the others.
  template <class Scalar, index_t N>
  KVFOLD_DEVICE static matrices right(const shared_array<Scalar, N>& from, index_t at, index_t row,
                                      index_t k) {
    return load_matrices(from,
                         at + place(row + lane() % 8 + lane() / 16 * 8, k * 2 + lane() / 8 % 2));
  }
  /// ... as the right side whose rows they are: eight of the elements, then the others.
  template <class Scalar, index_t N>
  KVFOLD_DEVICE static matrices right_transposed(const shared_array<Scalar, N>& from, index_t at,
                                                 index_t row, index_t k) {
    return load_matrices_transposed(from, at + place(row + lane() % 16, k * 2 + lane() / 16));
  }
};

/// `x += left · right` for 16 columns, of which `x` has eight and eight.
template <class Scalar>
KVFOLD_DEVICE void add_product(float (&x)[4], float (&y)[4], const unsigned (&left)[4],
                               const matrices& right) {
  const unsigned first[2] = {right.of[0], right.of[1]}, then[2] = {right.of[2], right.of[3]};
  mma_16x8x16<Scalar>(x, left, first);
  mma_16x8x16<Scalar>(y, left, then);
}

}  // namespace kvfold::cuda::detail
