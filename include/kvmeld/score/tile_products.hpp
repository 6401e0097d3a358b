// SPDX-License-Identifier: MIT
/// The two products of attention over a tile of slots, where each row is read once for several
/// queries, and those of two rows. `follows`: as `detail::fetched_ahead` has it.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::min
#include <cmath>      // std::sqrt
#include <cstddef>    // std::ptrdiff_t

#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/memory/convert.hpp"
#include "kvmeld/score/reduce.hpp"

namespace kvmeld::inline v0 {
namespace score {
inline namespace KVMELD_INSTRUCTIONS {

using detail::bytes_apart;

/// `dots[g][s] = q_g · k_s` for `Q` queries and `R` rows, `row` bytes apart. A product's order of
/// summation depends on `dim` alone: equal rows have equal products, whatever they are held as.
template <index_t Q, index_t R, class Scalar>
EIGEN_ALWAYS_INLINE void dot_block(const float* q, std::ptrdiff_t query, const Scalar* k,
                                   std::ptrdiff_t row, index_t dim, float* dots,
                                   std::ptrdiff_t next, [[maybe_unused]] std::ptrdiff_t ahead = 0) {
  using namespace Eigen::internal;
  constexpr index_t together = rows_together<Scalar, R>;
  packet sum[Q][R];
  index_t i = 0;
  for (index_t first = 0; first < R; first += together) {
    packet part[Q][together];
    KVMELD_UNROLL_EARLY
    for (index_t g = 0; g < Q; ++g) {
      KVMELD_UNROLL_EARLY
      for (index_t r = 0; r < together; ++r) {
        part[g][r] = pset1<packet>(0.0F);
      }
    }
    for (i = 0; i + lanes <= dim; i += lanes) {
      const Scalar* const x = detail::behind(k, first * row) + i;
      packet keys[together];
      KVMELD_UNROLL_EARLY
      for (index_t r = 0; r < together; ++r) {
        if constexpr (R > 1) {
          detail::fetch(detail::behind(x, r * row), ahead);
        }
        keys[r] = detail::widened(detail::behind(x, r * row));
      }
      KVMELD_UNROLL_EARLY
      for (index_t g = 0; g < Q; ++g) {
        const packet of_q = ploadu<packet>(q + g * query + i);
        KVMELD_UNROLL_EARLY
        for (index_t r = 0; r < together; ++r) {
          part[g][r] = pmadd(of_q, keys[r], part[g][r]);
        }
      }
    }
    KVMELD_UNROLL_EARLY
    for (index_t g = 0; g < Q; ++g) {
      std::copy_n(part[g], together, sum[g] + first);
    }
  }
  if constexpr (Q * R % reduced == 0) {
    float sums[Q * R];
    KVMELD_UNROLL_EARLY
    for (index_t s = 0; s < Q * R; s += reduced) {
      reduce(&sum[0][0] + s, sums + s);
    }
    KVMELD_UNROLL_EARLY
    for (index_t g = 0; g < Q; ++g) {
      std::copy_n(sums + g * R, R, dots + g * next);
    }
  } else {
    for (index_t g = 0; g < Q; ++g) {
      for (index_t r = 0; r < R; ++r) {  // no other loop within: the sums stay in registers
        dots[g * next + r] = predux(sum[g][r]);
      }
    }
  }
  for (index_t g = 0; g < Q && i < dim; ++g) {
    for (index_t r = 0; r < R; ++r) {
      float& dot = dots[g * next + r];
      dot = with_rest(dot, q + g * query, detail::behind(k, r * row), i, dim);
    }
  }
}

template <index_t Q, class Tile>
KVMELD_NOINLINE void dot_rows(const float* q, std::ptrdiff_t query, const Tile& keys, float* dots,
                              std::ptrdiff_t next, std::ptrdiff_t follows) {
  constexpr index_t rows_at_once = sums_at_once / Q > 8 ? 8 : sums_at_once / Q;
  const auto rows = static_cast<index_t>(keys.rows()), dim = static_cast<index_t>(keys.cols());
  const std::ptrdiff_t row = bytes_apart(keys);
  const std::ptrdiff_t ahead = detail::fetched_ahead(row, follows);
  index_t s = 0;
  for (; s + rows_at_once <= rows; s += rows_at_once) {
    const auto* const k = detail::behind(keys.data(), s * row);
    if (rows_at_once == detail::prefetch_distance || s % detail::prefetch_distance == 0) {
      detail::prefetch_row(k, row);
    }
    dot_block<Q, rows_at_once>(q, query, k, row, dim, dots + s, next, ahead);
  }
  for (; s < rows; ++s) {
    dot_block<Q, 1>(q, query, detail::behind(keys.data(), s * row), row, dim, dots + s, next);
  }
}

/// `dots [queries, next] = q [queries, dim] · keysᵀ`, the first `keys.rows()` of each row.
template <class Tile = detail::tile>
EIGEN_ALWAYS_INLINE void qk_tile(const float* q, index_t queries, const Tile& keys, float* dots,
                                 std::ptrdiff_t next, std::ptrdiff_t follows = 0) {
  const std::ptrdiff_t dim = keys.cols();
  index_t g = 0;
  for (; g + 4 <= queries; g += 4) {
    dot_rows<4>(q + g * dim, dim, keys, dots + g * next, next, follows);
  }
  for (; g + 2 <= queries; g += 2) {
    dot_rows<2>(q + g * dim, dim, keys, dots + g * next, next, follows);
  }
  for (; g < queries; ++g) {
    dot_rows<1>(q + g * dim, dim, keys, dots + g * next, next, follows);
  }
}

/// `out_g += Σ_s p_gs v_s` for `Q` queries and `P` packets of elements from `i` on.
template <index_t Q, index_t P, class Tile>
KVMELD_NOINLINE void sum_block(const float* p, std::ptrdiff_t next, const Tile& values, index_t i,
                               float* out, std::ptrdiff_t query, std::ptrdiff_t follows) {
  using namespace Eigen::internal;
  packet sum[Q][P];
  KVMELD_UNROLL_EARLY
  for (index_t g = 0; g < Q; ++g) {
    KVMELD_UNROLL_EARLY
    for (index_t c = 0; c < P; ++c) {
      sum[g][c] = ploadu<packet>(out + g * query + i + std::ptrdiff_t{c} * lanes);
    }
  }
  const std::ptrdiff_t row = bytes_apart(values);
  const auto* v = values.data() + i;
  const std::ptrdiff_t ahead = detail::fetched_ahead(row, follows);
  const Eigen::Index rows_at_once = P > 1 ? Eigen::Index{detail::prefetch_distance} : values.rows();
  for (Eigen::Index begin = 0; begin < values.rows(); begin += rows_at_once) {
    const Eigen::Index end = std::min(begin + rows_at_once, values.rows());
    if constexpr (P > 1) {
      detail::prefetch_row(v, row);
    }
    for (Eigen::Index s = begin; s < end; ++s, v = detail::behind(v, row)) {
      packet value[P];
      KVMELD_UNROLL_EARLY
      for (index_t c = 0; c < P; ++c) {
        if constexpr (P > 1) {
          detail::fetch(v + c * lanes, ahead);
        }
        value[c] = detail::widened(v + c * lanes);
      }
      KVMELD_UNROLL_EARLY
      for (index_t g = 0; g < Q; ++g) {
        const packet weight = pset1<packet>(p[g * next + s]);
        KVMELD_UNROLL_EARLY
        for (index_t c = 0; c < P; ++c) {
          sum[g][c] = pmadd(weight, value[c], sum[g][c]);
        }
      }
    }
  }
  KVMELD_UNROLL_EARLY
  for (index_t g = 0; g < Q; ++g) {
    KVMELD_UNROLL_EARLY
    for (index_t c = 0; c < P; ++c) {
      pstoreu(out + g * query + i + std::ptrdiff_t{c} * lanes, sum[g][c]);
    }
  }
}

template <index_t Q, class Tile>
void sum_rows(const float* p, std::ptrdiff_t next, const Tile& values, float* out,
              std::ptrdiff_t query, std::ptrdiff_t follows) {
  constexpr index_t packets_at_once = sums_at_once / Q > 8 ? 8 : sums_at_once / Q;
  const auto dim = static_cast<index_t>(values.cols());
  index_t i = 0;
  for (; i + packets_at_once * lanes <= dim; i += packets_at_once * lanes) {
    sum_block<Q, packets_at_once>(p, next, values, i, out, query, follows);
  }
  for (; i + lanes <= dim; i += lanes) {
    sum_block<Q, 1>(p, next, values, i, out, query, follows);
  }
  for (; i < dim; ++i) {
    for (index_t g = 0; g < Q; ++g) {
      float sum = out[g * query + i];
      for (Eigen::Index s = 0; s < values.rows(); ++s) {
        const auto* const value = detail::behind(values.data(), s * bytes_apart(values));
        sum = detail::multiply_add(p[g * next + s], detail::number(value, i), sum);
      }
      out[g * query + i] = sum;
    }
  }
}

/// `out [queries, dim] += p [queries, next] · values`, of the first `values.rows()` of each row.
template <class Tile = detail::tile>
EIGEN_ALWAYS_INLINE void pv_tile(const float* p, std::ptrdiff_t next, index_t queries,
                                 const Tile& values, float* out, std::ptrdiff_t follows = 0) {
  const std::ptrdiff_t dim = values.cols();
  index_t g = 0;
  for (; g + 4 <= queries; g += 4) {
    sum_rows<4>(p + g * next, next, values, out + g * dim, dim, follows);
  }
  for (; g + 2 <= queries; g += 2) {
    sum_rows<2>(p + g * next, next, values, out + g * dim, dim, follows);
  }
  for (; g < queries; ++g) {
    sum_rows<1>(p + g * next, next, values, out + g * dim, dim, follows);
  }
}

}  // namespace KVMELD_INSTRUCTIONS

KVMELD_NOINLINE inline float dot_floats(const float* x, const float* y, index_t dim) {
  float sum = 0;
  dot_block<1, 1>(x, 0, y, 0, dim, &sum, 0);
  return sum;
}
template <class X, class Y>
KVMELD_NOINLINE float dot_converted(row<X> x, row<Y> y, index_t dim) {
  constexpr index_t chunk = 256;
  float a[chunk], b[chunk], sum = 0;
  for (index_t begin = 0; begin < dim; begin += chunk) {
    const index_t n = std::min(chunk, dim - begin);
    to_floats(x.from(begin), n, a);
    to_floats(y.from(begin), n, b);
    sum += dot_floats(a, b, n);
  }
  return sum;
}

/// `x·y [dim]` in float, always summed in the same order, so that equal rows have equal products.
template <class X, class Y>
EIGEN_ALWAYS_INLINE float dot(row<X> x, row<Y> y, index_t dim) {
  const float *const xs = detail::floats_in(x), *const ys = detail::floats_in(y);
  return xs != nullptr && ys != nullptr ? dot_floats(xs, ys, dim) : dot_converted(x, y, dim);
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

}  // namespace kvmeld::inline v0
