// SPDX-License-Identifier: MIT
/// Triangular systems, with no more stack than a few numbers: Eigen's own solver has its blocks
/// there, which are larger than some threads' stacks.
#pragma once

#include <algorithm>  // std::min

#include "kvmeld/detail/product.hpp"

namespace kvmeld {
inline namespace v0 {
namespace dense {

/// `x [n, columns] ← L⁻¹ x` for a lower triangle `L`. `upper [n, n]`: `Lᵀ`, row by row; below its
/// diagonal nothing is read.
template <rowwise L, rowwise X>
void solve_lower(const L& upper, X& x) {
  constexpr Eigen::Index block = 32,
                         wide = 256;  // rows solved together, columns in the nearest cache
  const Eigen::Index n = x.rows(), columns = x.cols();
  for (Eigen::Index first = 0; first < n; first += block) {
    const Eigen::Index count = std::min(block, n - first);
    if (first > 0) {
      add_transposed_product(-1, upper.block(0, first, first, count), x.topRows(first),
                             x.middleRows(first, count));
    }
    for (Eigen::Index column = 0; column < columns; column += wide) {
      auto part = x.block(first, column, count, std::min(wide, columns - column));
      for (Eigen::Index i = 0; i < count; ++i) {
        for (Eigen::Index j = 0; j < i; ++j) {
          part.row(i) -= upper(first + j, first + i) * part.row(j);
        }
        part.row(i) /= upper(first + i, first + i);
      }
    }
  }
}

}  // namespace dense
}  // namespace v0
}  // namespace kvmeld
