// SPDX-License-Identifier: MIT
/// Products of tiles of halfs on tensor cores, for matrices that lie in global memory.
#pragma once

#include "kvmeld/cuda/device/half_tile.cuh"

namespace kvmeld::cuda::detail {

/// A matrix of halfs, row by row. Where numbers are two halfs each, the second ones lie `low`
/// elements further on. Rows begin at multiples of 16 bytes.
struct half_rows {
  const half* data;
  std::ptrdiff_t pitch, low;
};

/// `x` as a half and as what that leaves, a half too: 22 bits together.
struct split_number {
  half high, low;

  KVMELD_HD static split_number of(float x) {
    const half high = from_float<half>(x);
    return {high, from_float<half>(x - to_float(high))};
  }
};

/// Word `i` of lane `j`, of four lanes each, becomes word `j` of lane `i`.
KVMELD_DEVICE inline void transpose_quad(unsigned (&x)[4]) {
  KVMELD_UNROLL
  for (index_t d = 1; d <= 2; d *= 2) {
    const bool upper = (lane() & d) != 0;
    unrolled<2>([&](index_t k) {
      unsigned& a = x[d == 1 ? 2 * k : k];
      unsigned& b = x[d == 1 ? 2 * k + 1 : k + 2];
      const unsigned theirs = shuffle_xor(upper ? a : b, d);
      (upper ? a : b) = theirs;
    });
  }
}
KVMELD_DEVICE inline vector_16<half> halves_of(const unsigned (&x)[4]) {
  vector_16<half> packed;
  unrolled<4>([&](index_t k) {
    packed[2 * k] = low_of<half>(x[k]), packed[2 * k + 1] = high_of<half>(x[k]);
  });
  return packed;
}

/// A block of 8 warps multiplies 128 rows by 128 others, `depth` elements of both at a time, which
/// stream through a ring of stages. Numbers are a half (`Halves` 1) or two; then
/// `high·high + high·low + low·high` is summed, so that a product errs by about 2^-22. Of the left
/// side `Left` halves count. `Columns`: the 128 numbers of a piece's `depth` rows are multiplied,
/// and not 128 rows. A warp has 64 × 32 sums.
template <index_t Halves, index_t Left = Halves, bool Columns = false>
struct tile_product {
  static_assert(Halves == 1 || (Halves == 2 && (Left == 1 || Left == 2)));
  static constexpr index_t threads = 256, side = 128, size = side * side;
  static constexpr index_t depth = 64 / Halves, packs = depth / 8, stages = 3;
  using tile = half_tile<Columns ? side : depth>;
  static constexpr index_t piece = side * depth, stage = 2 * Halves * piece;
  using ring = shared_array<half, stages * stage>;
  /// A lane's part: element `[m][n][i]` is of `row(m, i)` and `column(n, i)`.
  using sums = float[4][4][4];

  KVMELD_DEVICE static index_t row(index_t m, index_t i) {
    return warp() / 4 * 64 + m * 16 + lane() / 4 + (i >= 2 ? 8 : 0);
  }
  KVMELD_DEVICE static index_t column(index_t n, index_t i) {
    return warp() % 4 * 32 + n * 8 + lane() % 4 * 2 + (i & 1);
  }

  /// `sum += Σ_s a_s b_sᵀ` (of `Columns` `a_sᵀ b_s`) over `steps` pieces; `at(s, a, b)` names the
  /// halfs at which the rows of both begin. `same`: b is a. Every thread is done with the ring at
  /// the end, and comes with it at its disposal.
  template <class At>
  KVMELD_DEVICE static void add(ring& shared, index_t steps, bool same, At at, sums& sum) {
    each_staged<stages>(
        steps,
        [&](index_t s, index_t) {
          half_rows a{}, b{};
          at(s, a, b);
          const index_t to = s % stages * stage;
          copy<Left>(shared, to, a);
          if (!same) {
            copy<Halves>(shared, to + Halves * piece, b);
          }
        },
        [&](index_t s, index_t) {
          const index_t a = s % stages * stage;
          multiply(shared, a, same ? a : a + Halves * piece, sum);
        });
    sync_block();
  }

  /// The sums in the order of threads, as `load_sums` takes them back: `to [size]`.
  KVMELD_DEVICE static void store_sums(const sums& sum, float* to) {
    unrolled<4, 4>([&](index_t m, index_t n) {
      const auto& x = sum[m][n];
      store_16(to + place_of(m, n), vector_16<float>{{x[0], x[1], x[2], x[3]}});
    });
  }
  /// A lane's four sums `[m][n]` of those.
  KVMELD_DEVICE static vector_16<float> load_sums(const float* from, index_t m, index_t n) {
    return load_16(from + place_of(m, n));
  }

  /// The sums as split numbers, row by row: `to [2, side, side]`.
  KVMELD_DEVICE static void store_split(const sums& sum, half* to) {
    unrolled<4>([&](index_t m) {
      KVMELD_UNROLL
      for (index_t i = 0; i < 4; i += 2) {
        unsigned high[4], low[4];
        unrolled<4>([&](index_t n) {
          const auto a = split_number::of(sum[m][n][i]), b = split_number::of(sum[m][n][i + 1]);
          high[n] = pair_of(a.high, b.high), low[n] = pair_of(a.low, b.low);
        });
        store_quad(high, to + row(m, i) * side);
        store_quad(low, to + size + row(m, i) * side);
      }
    });
  }

 private:
  KVMELD_DEVICE static index_t place_of(index_t m, index_t n) {
    return ((m * 4 + n) * threads + thread_index()) * 4;
  }
  template <index_t Parts>
  KVMELD_DEVICE static void copy(ring& shared, index_t to, const half_rows& from) {
    unrolled<Parts>([&](index_t part) {
      KVMELD_UNROLL
      for (index_t e = 0; e < side * packs; e += threads) {
        const index_t r = (e + thread_index()) / tile::packs,
                      p = (e + thread_index()) % tile::packs;
        copy_async(shared, to + part * piece + tile::place(r, p),
                   from.data + part * from.low + r * from.pitch + p * 8);
      }
    });
  }
  KVMELD_DEVICE static matrices left_of(const ring& shared, index_t at, index_t m, index_t k) {
    const index_t r = warp() / 4 * 64 + m * 16;
    if constexpr (Columns) {
      return tile::left_of_columns(shared, at, r, k * 16);
    } else {
      return tile::left(shared, at, r, k);
    }
  }
  KVMELD_DEVICE static matrices right_of(const ring& shared, index_t at, index_t n, index_t k) {
    const index_t r = warp() % 4 * 32 + n * 16;
    if constexpr (Columns) {
      return tile::right_of_columns(shared, at, r, k * 16);
    } else {
      return tile::right(shared, at, r, k);
    }
  }
  KVMELD_DEVICE static void multiply(const ring& shared, index_t a, index_t b, sums& sum) {
    if constexpr (Halves == 1 && !Columns) {
      KVMELD_UNROLL
      for (index_t k = 0; k < depth / 16; ++k) {
        multiply_sixteen(shared, a, b, k, sum);
      }
    } else {  // unrolled it wants more registers than there are
      KVMELD_ROLLED
      for (index_t k = 0; k < depth / 16; ++k) {
        multiply_sixteen(shared, a, b, k, sum);
      }
    }
  }
  KVMELD_DEVICE static void multiply_sixteen(const ring& shared, index_t a, index_t b, index_t k,
                                             sums& sum) {
    matrices right[Halves][2];
    KVMELD_UNROLL
    for (index_t part = 0; part < Halves; ++part) {
      KVMELD_UNROLL
      for (index_t n = 0; n < 2; ++n) {
        right[part][n] = right_of(shared, b + part * piece, n, k);
      }
    }
    KVMELD_UNROLL
    for (index_t m = 0; m < 4; ++m) {
      const matrices left = left_of(shared, a, m, k);
      if constexpr (Left == 2) {
        multiply_row(left_of(shared, a + piece, m, k), right[0], sum[m]);
      }
      if constexpr (Halves == 2) {
        multiply_row(left, right[1], sum[m]);
      }
      multiply_row(left, right[0], sum[m]);
    }
  }
  KVMELD_DEVICE static void multiply_row(const matrices& left, const matrices (&right)[2],
                                         float (&sum)[4][4]) {
    KVMELD_UNROLL
    for (index_t n = 0; n < 4; ++n) {
      const unsigned columns[2] = {right[n / 2].of[n % 2 * 2], right[n / 2].of[n % 2 * 2 + 1]};
      mma_16x8x16<half>(sum[n], left.of, columns);
    }
  }
  /// Of a row that four lanes hold in pairs, word `n` of each being of columns `8 n ...`: each
  /// lane stores eight columns.
  KVMELD_DEVICE static void store_quad(unsigned (&x)[4], half* row) {
    transpose_quad(x);
    store_16(row + warp() % 4 * 32 + lane() % 4 * 8, halves_of(x));
  }
};

}  // namespace kvmeld::cuda::detail
