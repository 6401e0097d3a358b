// SPDX-License-Identifier: MIT
/// Rows of floats as tensor cores multiply them: every number a sum of three bfloat16s.
#pragma once

#include "kvmeld/cuda/device/half_tile.cuh"

namespace kvmeld::cuda::detail {

/// A float in three bfloat16s: all of its 24 bits, of numbers from 2^-109 to 2^127.
struct split_float {
  static constexpr index_t parts = 3;
  bfloat16 of[parts];

  KVMELD_HD explicit split_float(float x) {
    KVMELD_UNROLL
    for (index_t k = 0; k < parts; ++k) {
      of[k] = from_float<bfloat16>(x);
      x -= to_float(of[k]);
    }
  }
};

/// A tile of such rows in shared memory, part behind part.
template <index_t Rows, index_t Depth>
struct split_tile {
  using tile = half_tile<Depth>;
  static constexpr index_t parts = split_float::parts, part = Rows * Depth, size = parts * part;

  template <index_t N>
  KVMELD_DEVICE static void put(shared_array<bfloat16, N>& to, index_t at, index_t row, index_t i,
                                float x) {
    const split_float y(x);
    unrolled<parts>(
        [&](index_t k) { to[at + k * part + tile::place(row, i / 8) + i % 8] = y.of[k]; });
  }
};

/// The same matrices of each part, as `half_tile` gives them.
struct split_matrices {
  matrices of[split_float::parts];
};

/// Adds the products of 16 rows with twice 8 others. Of the nine of a product's parts six are
/// multiplied, the least first: what is left out is 2^-24 of it, as when floats are rounded. Tensor
/// cores cut off what does not fit a sum, so theirs are of 16 products, and added as floats are.
KVMELD_DEVICE inline void multiply_split(const split_matrices& left, const split_matrices& right,
                                         float (&sum)[2][4]) {
  float some[2][4] = {};
  KVMELD_UNROLL
  for (index_t both = split_float::parts - 1; both >= 0; --both) {
    KVMELD_UNROLL
    for (index_t i = 0; i <= both; ++i) {
      unrolled<2>([&](index_t n) {
        const auto& x = right.of[both - i].of;
        const unsigned columns[2] = {x[2 * n], x[2 * n + 1]};
        mma_16x8x16<bfloat16>(some[n], left.of[i].of, columns);
      });
    }
  }
  unrolled<2, 4>([&](index_t n, index_t u) { sum[n][u] += some[n][u]; });
}

/// Eight numbers, at `to` and `part` further on for each of their parts.
KVMELD_DEVICE inline void store_split(const float (&x)[8], bfloat16* to, std::ptrdiff_t part) {
  vector_16<bfloat16> y[split_float::parts];
  unrolled<8>([&](index_t u) {
    const split_float z(x[u]);
    unrolled<split_float::parts>([&](index_t k) { y[k][u] = z.of[k]; });
  });
  unrolled<split_float::parts>([&](index_t k) { store_16(to + k * part, y[k]); });
}

}  // namespace kvmeld::cuda::detail
