// SPDX-License-Identifier: MIT
/// How the rows of a tile compare with another: products, norms, distances, directions.
#pragma once

#include <Eigen/Core>
#include <cmath>    // std::sqrt
#include <cstddef>  // std::ptrdiff_t

#include "kvmeld/score/tile_products.hpp"

namespace kvmeld {
inline namespace v0 {
namespace score {
inline namespace KVMELD_INSTRUCTIONS {

/// `squares [rows]` of the rows, or, less `from [dim]`, of their distances: each summed as products
/// are, so that equal rows have equal ones.
template <bool less>
void row_squares(const detail::tile& keys, const float* from, float* squares) {
  using namespace Eigen::internal;
  constexpr index_t some = 8;
  const auto rows = static_cast<index_t>(keys.rows()), dim = static_cast<index_t>(keys.cols());
  for (index_t s = 0; s < rows; s += some) {
    const index_t count = std::min(some, rows - s);
    packet sum[some];
    const float* row[some];
    for (index_t r = 0; r < some; ++r) {  // the last row stands in for those that are missing
      sum[r] = pset1<packet>(0.0F);
      row[r] = keys.data() + std::min(s + r, rows - 1) * keys.outerStride();
    }
    index_t i = 0;
    for (; i + lanes <= dim; i += lanes) {
      for (index_t r = 0; r < some; ++r) {
        packet x = ploadu<packet>(row[r] + i);
        if constexpr (less) {
          x = psub(x, ploadu<packet>(from + i));
        }
        sum[r] = pmadd(x, x, sum[r]);
      }
    }
    float square[some];
    for (index_t r = 0; r < some; ++r) {
      square[r] = predux(sum[r]);
    }
    for (index_t r = 0; r < count; ++r) {
      for (index_t j = i; j < dim; ++j) {
        const float x = less ? row[r][j] - from[j] : row[r][j];
        square[r] = detail::multiply_add(x, x, square[r]);
      }
      squares[s + r] = square[r];
    }
  }
}

/// `norms [rows]` of the rows: `√(k · k)`.
inline void row_norms(const detail::tile& keys, float* norms) {
  row_squares<false>(keys, nullptr, norms);
  for (Eigen::Index s = 0; s < keys.rows(); ++s) {
    norms[s] = std::sqrt(norms[s]);
  }
}

/// `dots[r] = x · k_r` and `squares[r] = k_r · k_r` of `R` rows.
template <index_t R>
void dot_and_square_block(const float* x, const float* k, std::ptrdiff_t row, index_t dim,
                          float* dots, float* squares) {
  using namespace Eigen::internal;
  packet product[R], square[R];
  for (index_t r = 0; r < R; ++r) {
    product[r] = square[r] = pset1<packet>(0.0F);
  }
  index_t i = 0;
  for (; i + lanes <= dim; i += lanes) {
    const packet with = ploadu<packet>(x + i);
    for (index_t r = 0; r < R; ++r) {
      const packet key = ploadu<packet>(k + r * row + i);
      product[r] = pmadd(with, key, product[r]);
      square[r] = pmadd(key, key, square[r]);
    }
  }
  for (index_t r = 0; r < R; ++r) {
    dots[r] = predux(product[r]), squares[r] = predux(square[r]);
  }
  for (index_t r = 0; r < R && i < dim; ++r) {
    dots[r] = with_rest(dots[r], x, k + r * row, i, dim);
    squares[r] = with_rest(squares[r], k + r * row, k + r * row, i, dim);
  }
}

/// Prefetches a row `[dim]`, four lines at a time.
inline void prefetch_row(const float* row, index_t dim) {
  constexpr index_t line = 64 / sizeof(float);
  index_t i = 0;
  for (; i + 4 * line <= dim; i += 4 * line) {
    for (index_t j = 0; j < 4; ++j) {
      const index_t at = i + j * line;
      Eigen::internal::prefetch(row + at);
    }
  }
  for (; i < dim; i += line) {
    Eigen::internal::prefetch(row + i);
  }
}

/// `dots [rows]` with `x [dim]` and `norms [rows]` in one pass over the rows; the same bits as
/// `qk_tile` and `row_norms`. Meanwhile prefetches as many rows from `next` on, unless null.
inline void row_dots_and_norms(const detail::tile& keys, const float* x, float* dots, float* norms,
                               const float* next = nullptr) {
  constexpr index_t some = sums_at_once / 2;
  const auto rows = static_cast<index_t>(keys.rows()), dim = static_cast<index_t>(keys.cols());
  const std::ptrdiff_t row = keys.outerStride();
  index_t s = 0;
  for (; s + some <= rows; s += some) {
    for (index_t r = s; next != nullptr && r < s + some; ++r) {
      prefetch_row(next + r * row, dim);
    }
    dot_and_square_block<some>(x, keys.data() + s * row, row, dim, dots + s, norms + s);
  }
  for (; s < rows; ++s) {
    dot_and_square_block<1>(x, keys.data() + s * row, row, dim, dots + s, norms + s);
  }
  for (s = 0; s < rows; ++s) {
    norms[s] = std::sqrt(norms[s]);
  }
}

/// `squares [rows]`: `‖k − x‖²`, `x [dim]`.
inline void row_distances(const detail::tile& keys, const float* x, float* squares) {
  row_squares<true>(keys, x, squares);
}

/// `sum [dim] += Σ k/‖k‖`, from the rows' `norms [rows]`; row after row, however they are tiled.
/// Zero keys add nothing, broken ones neither.
inline void add_directions(const detail::tile& keys, const float* norms, float* sum) {
  constexpr index_t some = 64;
  const auto rows = static_cast<index_t>(keys.rows());
  float weight[some];
  for (index_t first = 0; first < rows; first += some) {
    const index_t count = std::min(some, rows - first);
    bool all = true;
    for (index_t i = 0; i < count; ++i) {
      const float norm = norms[first + i];
      all = all && std::isfinite(norm);
      weight[i] = norm > 0 ? 1 / norm : 0.0F;
    }
    for (index_t i = 0; i < (all ? 1 : count); ++i) {  // 0 · NaN is NaN: such rows are left out
      if (all || weight[i] > 0) {
        const detail::tile part(keys.data() + (first + i) * keys.outerStride(), all ? count : 1,
                                keys.cols(), Eigen::OuterStride<>(keys.outerStride()));
        pv_tile(weight + i, 0, 1, part, sum);
      }
    }
  }
}

}  // namespace KVMELD_INSTRUCTIONS
}  // namespace score
}  // namespace v0
}  // namespace kvmeld
