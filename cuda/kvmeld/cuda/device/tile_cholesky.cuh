// SPDX-License-Identifier: MIT
/// The Cholesky factor of a tile in shared memory and its inverse, by a block.
#pragma once

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda::detail {

/// A symmetric tile `[side, side]` of floats, of which the lower triangle is used. 8 warps, 32
/// columns at a time; `side` is 128.
struct tile_cholesky {
  static constexpr index_t threads = 256, side = 128, pitch = side + 4, some = 32;
  using array = shared_array<float, side * pitch>;
  using row_numbers = float[some];

  KVMELD_DEVICE static index_t at(index_t row, index_t column) { return row * pitch + column; }
  /// A number for each row, beside the tile: 0 where its column was lost to rounding.
  KVMELD_DEVICE static index_t lost_at(index_t row) { return at(row / 4, side + row % 4); }

  /// `a`, all of whose eigenvalues are at least 1 but for rounding, becomes `L⁻¹`, `L Lᵀ = a`;
  /// above its diagonal lies whatever there was. A barrier before and after.
  KVMELD_DEVICE static void invert_factor(array& a) {
    eliminate(a, [](index_t, const row_numbers&) {});
    KVMELD_ROLLED
    for (index_t j = side / some - 2; j >= 0; --j) {
      invert_column(a, j);
      sync_block();
    }
  }

  /// ... becomes `L` itself; `diagonal` is scratch.
  using diagonal_array = shared_array<float, side*(some + 1)>;
  KVMELD_DEVICE static void factor(array& a, diagonal_array& diagonal) {
    eliminate(a, [&](index_t row, const row_numbers& of_factor) {
      unrolled<some>([&](index_t c) { diagonal[row * (some + 1) + c] = of_factor[c]; });
    });
    for (index_t e = thread_index(); e < side * some; e += threads) {
      const index_t row = e / some, c = e % some;
      if (c <= row % some) {
        a[at(row, row / some * some + c)] = diagonal[row * (some + 1) + c];
      }
    }
    sync_block();
  }

 private:
  /// `L` below the diagonal's blocks of 32 × 32, whose inverses lie there; their rows themselves go
  /// to `keep(row, numbers)`.
  template <class Keep>
  KVMELD_DEVICE static void eliminate(array& a, Keep keep) {
    sync_block();
    KVMELD_ROLLED
    for (index_t b = 0; b < side; b += some) {
      if (warp() == 0) {
        invert_diagonal(a, b, keep);
      }
      sync_block();
      solve_below(a, b);
      sync_block();
      subtract(a, b);
      sync_block();
    }
  }

  /// `x · own`, of 32 numbers from `from` on.
  KVMELD_DEVICE static float product(const array& a, index_t from, const row_numbers& own) {
    float sum = 0;
    KVMELD_UNROLL
    for (index_t k = 0; k < some; k += 4) {
      const auto x = a.vector(from + k);
      sum += x[0] * own[k] + x[1] * own[k + 1] + x[2] * own[k + 2] + x[3] * own[k + 3];
    }
    return sum;
  }
  KVMELD_DEVICE static void load_row(const array& a, index_t from, row_numbers& own) {
    KVMELD_UNROLL
    for (index_t k = 0; k < some; k += 4) {
      const auto x = a.vector(from + k);
      own[k] = x[0], own[k + 1] = x[1], own[k + 2] = x[2], own[k + 3] = x[3];
    }
  }

  /// The 32 × 32 at `b` on the diagonal becomes the inverse of its factor, zeros above. A warp,
  /// whose lanes have a row each, then a column each.
  template <class Keep>
  KVMELD_DEVICE static void invert_diagonal(array& a, index_t b, Keep keep) {
    row_numbers r;
    load_row(a, at(b + lane(), b), r);
    float own = 0, mine = 1;  // of the lane's pivot; 0: its column was lost
    unrolled<some>([&](index_t k) {
      const float pivot = shuffle(r[k], k);  // at least 1 but for rounding
      const float inverse = inverse_square_root(pivot > 1 ? pivot : 1.0F);
      own = lane() == k ? inverse : own;
      // Where rounding has left less than half of that, the column is nothing but rounding too.
      const bool lost = !(pivot > 0.5F);
      mine = lane() == k && lost ? 0.0F : mine;
      r[k] = !lost ? r[k] * inverse : lane() == k ? 1.0F : 0.0F;
      KVMELD_UNROLL
      for (index_t c = k + 1; c < some; ++c) {
        r[c] -= r[k] * shuffle(r[k], c);
      }
    });
    keep(b + lane(), r);
    a[lost_at(b + lane())] = mine;
    sync_warp();
    unrolled<some>([&](index_t c) { a[at(b + lane(), b + c)] = r[c]; });
    sync_warp();
    row_numbers x;
    unrolled<some>([&](index_t i) {
      float sum[2] = {i == lane() ? 1.0F : 0.0F, 0};
      KVMELD_UNROLL
      for (index_t k = 0; k < i; k += 4) {
        const auto y = a.vector(at(b + i, b + k));
        unrolled<4>([&](index_t e) { sum[e % 2] -= k + e < i ? y[e] * x[k + e] : 0.0F; });
      }
      x[i] = (sum[0] + sum[1]) * shuffle(own, i);
    });
    sync_warp();
    unrolled<some>([&](index_t i) { a[at(b + i, b + lane())] = x[i]; });
  }

  /// The factor's rows below: times the inverse, transposed. A lane a column, four rows at a time.
  KVMELD_DEVICE static void solve_below(array& a, index_t b) {
    row_numbers own;
    load_row(a, at(b + lane(), b), own);
    const float mine = a[lost_at(b + lane())];
    KVMELD_ROLLED
    for (index_t r = b + some + warp() * 4; r < side; r += some) {
      float sum[4];
      unrolled<4>([&](index_t u) { sum[u] = product(a, at(r + u, b), own); });
      sync_warp();
      unrolled<4>([&](index_t u) { a[at(r + u, b + lane())] = mine == 0 ? 0.0F : sum[u]; });
    }
  }

  /// What those take from the lower triangle of what is left.
  KVMELD_DEVICE static void subtract(array& a, index_t b) {
    KVMELD_ROLLED
    for (index_t c = b + some; c < side; c += some) {
      row_numbers own;
      load_row(a, at(c + lane(), b), own);
      KVMELD_ROLLED
      for (index_t r = c + warp() * 4; r < side; r += some) {
        unrolled<4>([&](index_t u) { a[at(r + u, c + lane())] += -product(a, at(r + u, b), own); });
      }
    }
  }

  /// Blocks `i > j` of column `j` become `−(Σ_k V_ik L_kj) V_jj`, where `V`, the inverse, lies on
  /// the diagonal and in later columns. A warp has four rows of every block.
  KVMELD_DEVICE static void invert_column(array& a, index_t j) {
    constexpr index_t most = side / some - 1;
    float sum[most][4] = {};
    unrolled<most>([&](index_t u) {
      const index_t i = j + 1 + u;
      KVMELD_ROLLED
      for (index_t k = (j + 1) * some; i <= most && k < (i + 1) * some; k += 4) {
        float y[4];
        unrolled<4>([&](index_t e) { y[e] = a[at(k + e, j * some + lane())]; });
        unrolled<4>([&](index_t q) {
          const auto x = a.vector(at(i * some + warp() * 4 + q, k));
          sum[u][q] += x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
        });
      }
    });
    sync_block();  // all have read
    row_numbers own;
    unrolled<some>([&](index_t k) { own[k] = a[at(j * some + k, j * some + lane())]; });
    unrolled<most>([&](index_t u) {
      const index_t r = (j + 1 + u) * some + warp() * 4;
      if (r < side) {
        unrolled<4>([&](index_t q) { a[at(r + q, j * some + lane())] = sum[u][q]; });
        sync_warp();
        unrolled<4>([&](index_t q) { sum[u][q] = -product(a, at(r + q, j * some), own); });
        sync_warp();
        unrolled<4>([&](index_t q) { a[at(r + q, j * some + lane())] = sum[u][q]; });
      }
    });
  }
};

/// Scratch of `factor_lower`.
struct factor_memory {
  shared_array<float, 1> pivot;
};

/// Of a symmetric positive `a [n, n]`, whose lower triangle lies column by column (element `i, j`
/// at `a[j · n + i]`), makes `L`, `L Lᵀ = a`, in the same place, but for the diagonal, which
/// becomes its inverse: a thread a row, so `n` is at most `Threads`. By a block, in memory that it
/// alone sees; n³/3 products. A barrier before and after.
template <index_t Threads>
KVMELD_DEVICE void factor_lower(factor_memory& shared, float* a, index_t n) {
  const index_t i = thread_index();
  const auto at = [a, n](index_t row, index_t column) -> float& {
    return a[std::ptrdiff_t{column} * n + row];
  };
  sync_block();
  for (index_t j = 0; j < n; ++j) {  // column j from the columns before it
    float x = 0;
    if (i >= j && i < n) {
      x = at(i, j);
      for (index_t k = 0; k < j; ++k) {
        x -= at(i, k) * at(j, k);
      }
    }
    if (i == j) {
      shared.pivot[0] = 1.0F / square_root(x);
    }
    sync_block();
    if (i >= j && i < n) {
      const float inverse = shared.pivot[0];
      at(i, j) = i == j ? inverse : x * inverse;
    }
    sync_block();
  }
}

/// ... and makes `L⁻¹` of it, in the same place too.
template <index_t Threads>
KVMELD_DEVICE void factor_inverse(factor_memory& shared, float* a, index_t n) {
  const index_t i = thread_index();
  const auto at = [a, n](index_t row, index_t column) -> float& {
    return a[std::ptrdiff_t{column} * n + row];
  };
  factor_lower<Threads>(shared, a, n);
  // Its inverse from the last column on; the diagonal is already there.
  for (index_t j = n - 2; j >= 0; --j) {
    float x = 0;
    if (i > j && i < n) {
      for (index_t k = j + 1; k <= i; ++k) {
        x += at(i, k) * at(k, j);
      }
    }
    sync_block();
    if (i > j && i < n) {
      at(i, j) = -x * at(j, j);
    }
    sync_block();
  }
}

}  // namespace kvmeld::cuda::detail
