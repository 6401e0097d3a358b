// SPDX-License-Identifier: MIT
/// Products and distances of two rows, of whatever storage.
#pragma once

#include <algorithm>  // std::min
#include <cmath>      // std::sqrt

#include "kvmeld/score/tile_products.hpp"

namespace kvmeld {
inline namespace v0 {
namespace score {

/// `x·y [dim]` in float, always summed in the same order, so that equal rows have equal products.
template <class X, class Y>
float dot(row<X> x, row<Y> y, index_t dim) {
  float sum = 0;
  const float *const xs = detail::floats_in(x), *const ys = detail::floats_in(y);
  if (xs != nullptr && ys != nullptr) {
    dot_block<1, 1>(xs, 0, ys, 0, dim, &sum, 0);
    return sum;
  }
  constexpr index_t chunk = 256;
  float a[chunk], b[chunk];
  for (index_t begin = 0; begin < dim; begin += chunk) {
    const index_t n = std::min(chunk, dim - begin);
    to_floats(x.from(begin), n, a);
    to_floats(y.from(begin), n, b);
    float part = 0;
    dot_block<1, 1>(a, 0, b, 0, n, &part, 0);
    sum += part;
  }
  return sum;
}

/// `‖x − y‖² [dim]` in float.
template <class X, class Y>
float squared_distance(row<X> x, row<Y> y, index_t dim) {
  constexpr index_t chunk = 256;
  float a[chunk], b[chunk], sum = 0;
  for (index_t begin = 0; begin < dim; begin += chunk) {
    const index_t n = std::min(chunk, dim - begin);
    to_floats(x.from(begin), n, a);
    to_floats(y.from(begin), n, b);
    for (index_t i = 0; i < n; ++i) {
      a[i] -= b[i];
    }
    float part = 0;
    dot_block<1, 1>(a, 0, a, 0, n, &part, 0);
    sum += part;
  }
  return sum;
}

}  // namespace score

/// `‖x‖ [dim]` in float.
template <class X>
float norm(row<X> x, index_t dim) {
  return std::sqrt(score::dot(x, x, dim));
}

}  // namespace v0
}  // namespace kvmeld
