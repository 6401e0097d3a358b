// SPDX-License-Identifier: MIT
/// How the rows of a tile compare with another: products, norms, distances, directions.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::max
#include <cmath>      // std::abs
#include <cstddef>    // std::ptrdiff_t
#include <limits>     // std::numeric_limits

#include "kvmeld/memory/view.hpp"
#include "kvmeld/score/tile_products.hpp"

namespace kvmeld::inline v0 {
namespace score {
inline namespace KVMELD_INSTRUCTIONS {

/// `squares [rows]` of the rows, or, less `from [dim]`, of their distances: each summed as products
/// are, so that equal rows have equal ones.
template <bool less>
void row_squares(const detail::tile& keys, const float* from, float* squares) {
  using namespace Eigen::internal;
  constexpr index_t rows_at_once = 8;
  const auto rows = static_cast<index_t>(keys.rows()), dim = static_cast<index_t>(keys.cols());
  for (index_t s = 0; s < rows; s += rows_at_once) {
    const index_t count = std::min(rows_at_once, rows - s);
    packet sum[rows_at_once];
    const float* row[rows_at_once];
    for (index_t r = 0; r < rows_at_once;
         ++r) {  // the last row stands in for those that are missing
      sum[r] = pset1<packet>(0.0F);
      row[r] = keys.data() + std::min(s + r, rows - 1) * keys.outerStride();
    }
    index_t i = 0;
    for (; i + lanes <= dim; i += lanes) {
      for (index_t r = 0; r < rows_at_once; ++r) {
        packet x = ploadu<packet>(row[r] + i);
        if constexpr (less) {
          x = psub(x, ploadu<packet>(from + i));
        }
        sum[r] = pmadd(x, x, sum[r]);
      }
    }
    float square[rows_at_once];
    for (index_t r = 0; r < rows_at_once; ++r) {
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
  take_roots(norms, static_cast<index_t>(keys.rows()));
}

/// `dots[r] = x · k_r` and `squares[r] = k_r · k_r` of `R` rows.
template <index_t R>
void dots_and_squares_block(const float* x, const float* k, std::ptrdiff_t row,
                            std::ptrdiff_t ahead, index_t dim, float* dots, float* squares) {
  using namespace Eigen::internal;
  constexpr index_t together = rows_together<float, R>;
  packet product[R], square[R];
  index_t i = 0;
  for (index_t first = 0; first < R; first += together) {
    packet with_x[together], own[together];
    KVMELD_UNROLL_EARLY
    for (index_t r = 0; r < together; ++r) {
      with_x[r] = own[r] = pset1<packet>(0.0F);
    }
    for (i = 0; i + lanes <= dim; i += lanes) {
      const packet with = ploadu<packet>(x + i);
      KVMELD_UNROLL_EARLY
      for (index_t r = 0; r < together; ++r) {
        const float* const at = k + (first + r) * row + i;
        detail::fetch(at, ahead);
        const packet key = loaded(at);
        with_x[r] = pmadd(with, key, with_x[r]);
        own[r] = pmadd(key, key, own[r]);
      }
    }
    std::copy_n(with_x, together, product + first);
    std::copy_n(own, together, square + first);
  }
  const auto store = [](const packet* sums, float* out) {
    if constexpr (R == reduced) {
      reduce(sums, out);
    } else {
      KVMELD_UNROLL_EARLY
      for (index_t r = 0; r < R; ++r) {
        out[r] = predux(sums[r]);
      }
    }
  };
  store(product, dots);
  store(square, squares);
  for (index_t r = 0; r < R && i < dim; ++r) {
    dots[r] = with_rest(dots[r], x, k + r * row, i, dim);
    squares[r] = with_rest(squares[r], k + r * row, k + r * row, i, dim);
  }
}

/// `dots [rows]` with `x [dim]` and `norms [rows]` in one pass over the rows; the same bits as
/// `qk_tile` and `row_norms`.
inline void row_dots_and_norms(const detail::tile& keys, const float* x, float* dots,
                               float* norms) {
  constexpr index_t rows_at_once = sums_at_once / 2;
  const auto rows = static_cast<index_t>(keys.rows()), dim = static_cast<index_t>(keys.cols());
  const std::ptrdiff_t row = keys.outerStride();
  const float* k = keys.data();
  const std::ptrdiff_t ahead = detail::fetched_ahead(bytes_apart(keys), 0);
  index_t s = 0;
  for (; s + rows_at_once <= rows; s += rows_at_once, k += rows_at_once * row) {
    if (s % detail::prefetch_distance == 0) {
      detail::prefetch_row(k, bytes_apart(keys));
    }
    dots_and_squares_block<rows_at_once>(x, k, row, ahead, dim, dots + s, norms + s);
    take_roots(norms + s, rows_at_once);
  }
  for (; s < rows; ++s, k += row) {
    dots_and_squares_block<1>(x, k, row, ahead, dim, dots + s, norms + s);
    take_roots(norms + s, 1);
  }
}

/// `squares [rows]`: `‖k − x‖²`, `x [dim]`.
inline void row_distances(const detail::tile& keys, const float* x, float* squares) {
  row_squares<true>(keys, x, squares);
}

/// `sum [dim] += Σ k/‖k‖`, from the rows' `norms [rows]`; row after row, however they are tiled.
/// Zero keys add nothing, broken ones neither.
inline void add_directions(const detail::tile& keys, const float* norms, float* sum) {
  constexpr index_t rows_at_once = 64;
  constexpr float most = std::numeric_limits<float>::max();
  const auto rows = static_cast<index_t>(keys.rows());
  float weight[rows_at_once];
  for (index_t first = 0; first < rows; first += rows_at_once) {
    const index_t count = std::min(rows_at_once, rows - first);
    int broken = 0;  // is any? Without branches, so that compilers take many.
    for (index_t i = 0; i < count; ++i) {
      const float norm = norms[first + i];
      broken |= static_cast<int>(!(std::abs(norm) <= most));
      weight[i] = 1 / (norm > 0 ? norm : std::numeric_limits<float>::infinity());
    }
    const bool all = broken == 0;
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
}  // namespace kvmeld::inline v0
