/// The two products of attention over a tile of slots: each row is read once for several queries.
#pragma once

#include <Eigen/Core>
#include <cmath>    // std::sqrt
#include <cstddef>  // std::ptrdiff_t

#include "kvfold/tile.hpp"

namespace kvfold::detail {

using packet = Eigen::internal::packet_traits<float>::type;
inline constexpr index_t lanes = Eigen::internal::packet_traits<float>::size;
/// Sums that are kept in registers at a time: half of them, the rest hold what is multiplied.
inline constexpr index_t sums_at_once = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32 ? 16 : 8;

/// `sum` and the products of the elements that no packet holds.
inline float with_rest(float sum, const float* x, const float* y, index_t i, index_t dim) {
  for (; i < dim; ++i) {
    sum += x[i] * y[i];
  }
  return sum;
}

/// `dots[g][s] = q_g · k_s` for `Q` queries and `R` rows. A product's order of summation depends on
/// `dim` alone: equal rows have equal products.
template <index_t Q, index_t R>
void dot_block(const float* q, std::ptrdiff_t query, const float* k, std::ptrdiff_t row,
               index_t dim, float* dots, std::ptrdiff_t next) {
  using namespace Eigen::internal;
  packet sum[Q][R];
  for (index_t g = 0; g < Q; ++g) {
    for (index_t r = 0; r < R; ++r) {
      sum[g][r] = pset1<packet>(0.0F);
    }
  }
  index_t i = 0;
  for (; i + lanes <= dim; i += lanes) {
    packet keys[R];
    for (index_t r = 0; r < R; ++r) {
      keys[r] = ploadu<packet>(k + r * row + i);
    }
    for (index_t g = 0; g < Q; ++g) {
      const packet x = ploadu<packet>(q + g * query + i);
      for (index_t r = 0; r < R; ++r) {
        sum[g][r] = pmadd(x, keys[r], sum[g][r]);
      }
    }
  }
  for (index_t g = 0; g < Q; ++g) {
    for (index_t r = 0; r < R; ++r) {  // no other loop within: the sums stay in registers
      dots[g * next + r] = predux(sum[g][r]);
    }
  }
  for (index_t g = 0; g < Q && i < dim; ++g) {
    for (index_t r = 0; r < R; ++r) {
      float& dot = dots[g * next + r];
      dot = with_rest(dot, q + g * query, k + r * row, i, dim);
    }
  }
}

template <index_t Q>
void dot_rows(const float* q, std::ptrdiff_t query, const tile& keys, float* dots,
              std::ptrdiff_t next) {
  constexpr index_t some = sums_at_once / Q > 8 ? 8 : sums_at_once / Q;
  const auto rows = static_cast<index_t>(keys.rows()), dim = static_cast<index_t>(keys.cols());
  const std::ptrdiff_t row = keys.outerStride();
  index_t s = 0;
  for (; s + some <= rows; s += some) {
    if (some == rows_ahead || s % rows_ahead == 0) {
      look_ahead(keys.data() + s * row, row);
    }
    dot_block<Q, some>(q, query, keys.data() + s * row, row, dim, dots + s, next);
  }
  for (; s < rows; ++s) {
    dot_block<Q, 1>(q, query, keys.data() + s * row, row, dim, dots + s, next);
  }
}

/// `dots [queries, next] = q [queries, dim] · keysᵀ`, the first `keys.rows()` of each row.
inline void tile_dots(const float* q, index_t queries, const tile& keys, float* dots,
                      std::ptrdiff_t next) {
  const std::ptrdiff_t dim = keys.cols();
  index_t g = 0;
  for (; g + 4 <= queries; g += 4) {
    dot_rows<4>(q + g * dim, dim, keys, dots + g * next, next);
  }
  for (; g + 2 <= queries; g += 2) {
    dot_rows<2>(q + g * dim, dim, keys, dots + g * next, next);
  }
  for (; g < queries; ++g) {
    dot_rows<1>(q + g * dim, dim, keys, dots + g * next, next);
  }
}

/// `squares [rows]` of the rows, or, less `from [dim]`, of their distances: each summed as products
/// are, so that equal rows have equal ones.
template <bool less>
void row_squares(const tile& keys, const float* from, float* squares) {
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
        square[r] += x * x;
      }
      squares[s + r] = square[r];
    }
  }
}

/// `norms [rows]` of the rows: `√(k · k)`.
inline void row_norms(const tile& keys, float* norms) {
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

/// `dots [rows]` with `x [dim]` and `norms [rows]` from one look at each row; the same bits as
/// `tile_dots` and `row_norms`.
inline void row_dots_and_norms(const tile& keys, const float* x, float* dots, float* norms) {
  constexpr index_t some = sums_at_once / 2;
  const auto rows = static_cast<index_t>(keys.rows()), dim = static_cast<index_t>(keys.cols());
  const std::ptrdiff_t row = keys.outerStride();
  index_t s = 0;
  for (; s + some <= rows; s += some) {
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
inline void row_distances(const tile& keys, const float* x, float* squares) {
  row_squares<true>(keys, x, squares);
}

/// `out_g += Σ_s p_gs v_s` for `Q` queries and `P` packets of elements from `i` on.
template <index_t Q, index_t P>
void sum_block(const float* p, std::ptrdiff_t next, const tile& values, index_t i, float* out,
               std::ptrdiff_t query) {
  using namespace Eigen::internal;
  packet sum[Q][P];
  for (index_t g = 0; g < Q; ++g) {
    for (index_t c = 0; c < P; ++c) {
      sum[g][c] = ploadu<packet>(out + g * query + i + std::ptrdiff_t{c} * lanes);
    }
  }
  const std::ptrdiff_t row = values.outerStride();
  const float* v = values.data() + i;
  const Eigen::Index some = P > 1 ? Eigen::Index{rows_ahead} : values.rows();
  for (Eigen::Index begin = 0; begin < values.rows(); begin += some) {
    const Eigen::Index end = std::min(begin + some, values.rows());
    if constexpr (P > 1) {  // what is left over of a row has been asked for with the rest of it
      look_ahead(v, row);
    }
    for (Eigen::Index s = begin; s < end; ++s, v += row) {
      packet value[P];
      for (index_t c = 0; c < P; ++c) {
        value[c] = ploadu<packet>(v + std::ptrdiff_t{c} * lanes);
      }
      for (index_t g = 0; g < Q; ++g) {
        const packet weight = pset1<packet>(p[g * next + s]);
        for (index_t c = 0; c < P; ++c) {
          sum[g][c] = pmadd(weight, value[c], sum[g][c]);
        }
      }
    }
  }
  for (index_t g = 0; g < Q; ++g) {
    for (index_t c = 0; c < P; ++c) {
      pstoreu(out + g * query + i + std::ptrdiff_t{c} * lanes, sum[g][c]);
    }
  }
}

template <index_t Q>
void sum_rows(const float* p, std::ptrdiff_t next, const tile& values, float* out,
              std::ptrdiff_t query) {
  constexpr index_t some = sums_at_once / Q > 8 ? 8 : sums_at_once / Q;
  const auto dim = static_cast<index_t>(values.cols());
  index_t i = 0;
  for (; i + some * lanes <= dim; i += some * lanes) {
    sum_block<Q, some>(p, next, values, i, out, query);
  }
  for (; i + lanes <= dim; i += lanes) {
    sum_block<Q, 1>(p, next, values, i, out, query);
  }
  for (; i < dim; ++i) {
    for (index_t g = 0; g < Q; ++g) {
      float sum = out[g * query + i];
      for (Eigen::Index s = 0; s < values.rows(); ++s) {
        sum += p[g * next + s] * values(s, i);
      }
      out[g * query + i] = sum;
    }
  }
}

/// `out [queries, dim] += p [queries, next] · values`, of the first `values.rows()` of each row.
inline void tile_sums(const float* p, std::ptrdiff_t next, index_t queries, const tile& values,
                      float* out) {
  const std::ptrdiff_t dim = values.cols();
  index_t g = 0;
  for (; g + 4 <= queries; g += 4) {
    sum_rows<4>(p + g * next, next, values, out + g * dim, dim);
  }
  for (; g + 2 <= queries; g += 2) {
    sum_rows<2>(p + g * next, next, values, out + g * dim, dim);
  }
  for (; g < queries; ++g) {
    sum_rows<1>(p + g * next, next, values, out + g * dim, dim);
  }
}

/// `sum [dim] += Σ k/‖k‖`, from the rows' `norms [rows]`; row after row, however they are tiled.
/// Zero keys add nothing, broken ones neither.
inline void add_directions(const tile& keys, const float* norms, float* sum) {
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
        const tile part(keys.data() + (first + i) * keys.outerStride(), all ? count : 1,
                        keys.cols(), Eigen::OuterStride<>(keys.outerStride()));
        tile_sums(weight + i, 0, 1, part, sum);
      }
    }
  }
}

}  // namespace kvfold::detail
