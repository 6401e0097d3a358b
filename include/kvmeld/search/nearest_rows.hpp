// SPDX-License-Identifier: MIT
/// The nearest of some centres to each row of a matrix.
#pragma once

#include <algorithm>  // std::max_element
#include <cstddef>    // std::ptrdiff_t
#include <limits>     // std::numeric_limits
#include <vector>

#include "kvmeld/score/dense.hpp"

namespace kvmeld {
inline namespace v0 {
namespace search {

/// `see(row, products)` for every row of `x`: its products with all of `centres`, less half of each
/// one's square, so that the largest is that of the nearest centre. In blocks of rows.
template <class See>
void each_row_of_products(const dense::stored auto& x, const dense::stored auto& centres, See see) {
  const dense::vector half = 0.5F * centres.rowwise().squaredNorm();
  constexpr Eigen::Index block = 256;
  dense::matrix dot;
  for (Eigen::Index begin = 0; begin < x.rows(); begin += block) {
    const Eigen::Index rows = std::min(block, x.rows() - begin);
    dot.resize(rows, centres.rows());
    for (Eigen::Index r = 0; r < rows; ++r) {
      dot.row(r) = -half.transpose();
    }
    dense::add_product_transposed(1, x.middleRows(begin, rows), centres, dot);
    for (Eigen::Index r = 0; r < rows; ++r) {
      see(begin + r, dot.row(r));
    }
  }
}

/// Where the largest of `x [n]` is; ties to the lower place. With NaN among them any place may
/// come, or `n`. Compares many at a time at a vector's width, and then searches the place among
/// those alone.
inline std::ptrdiff_t first_largest(const float* x, std::ptrdiff_t n) {
  constexpr std::ptrdiff_t many = dense::array_size;
  if (n < many) {
    return std::max_element(x, x + n) - x;
  }
  const float* from = x;
  float most = -std::numeric_limits<float>::infinity();
  for (std::ptrdiff_t i = 0; i < n; i += many) {
    const float* const next = x + std::min(i, n - many);  // the last block overlaps the one before
    if (const float top = Eigen::Map<const dense::array>(next).maxCoeff(); top > most) {
      most = top, from = next;
    }
  }
  return std::find(from, x + n, most) - x;
}

/// Where the nearest of `products [centres]` is, ties to the lower one; 0 where none is a number.
inline Eigen::Index nearest_of(const auto& products) {
  const auto best = first_largest(products.data(), products.size());
  return best < products.size() ? best : 0;
}

/// The nearest of `centres` to each row; ties to the lower one.
void nearest(const dense::stored auto& x, const dense::stored auto& centres,
             std::vector<index_t>& out) {
  each_row_of_products(x, centres, [&](Eigen::Index row, const auto& products) {
    out[static_cast<std::size_t>(row)] = static_cast<index_t>(nearest_of(products));
  });
}

}  // namespace search
}  // namespace v0
}  // namespace kvmeld
