// SPDX-License-Identifier: MIT
/// Dense solves by one block: a Cholesky factor and its inverse.
#pragma once

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda::detail {

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
