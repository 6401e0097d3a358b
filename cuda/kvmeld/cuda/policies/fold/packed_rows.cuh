// SPDX-License-Identifier: MIT
/// Rows of 16-bit elements as tiles in shared memory, for products on tensor cores.
#pragma once

#include "kvmeld/cuda/device/half_tile.cuh"

namespace kvmeld::cuda::detail {

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
