// SPDX-License-Identifier: MIT
/// The rotation of values in 4 bits: no number of a row stands out, as a block's scale wants it.
#pragma once

#include <algorithm>  // std::transform
#include <cmath>      // std::sqrt

#include "kvmeld/memory/row.hpp"

namespace kvmeld::inline v0::detail {

/// `x [dim]` times the normalised Hadamard matrix (Sylvester's) of the largest power of two that
/// divides `dim`, block by block, in place. Orthogonal and its own inverse. An odd dim: unchanged.
inline void hadamard(float* x, index_t dim) {
  const index_t size = dim & -dim;
  const float norm = 1 / std::sqrt(static_cast<float>(size));
  for (index_t half = 1; half < size; half *= 2) {
    for (index_t begin = 0; begin < dim; begin += 2 * half) {
      for (index_t i = begin; i < begin + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b, x[i + half] = a - b;
      }
    }
  }
  for (index_t i = 0; i < dim; ++i) {
    x[i] *= norm;
  }
}

/// Writes `from [dim]` rotated.
template <class T>
KVMELD_NOINLINE void store_rotated(const T* from, row<any_scalar> to, index_t dim) {
  float x[4096];  // the longest row
  std::transform(from, from + dim, x, [](T e) { return static_cast<float>(e); });
  hadamard(x, dim);
  store_row(x, to, dim);
}

}  // namespace kvmeld::inline v0::detail
