// SPDX-License-Identifier: MIT
/// Products of queries with keys in q8_0: queries are rounded to 16 bits once a sweep, products
/// with the codes of a block are summed in integers, and sums multiplied with the scales.
#pragma once

#include <algorithm>  // std::copy_n, std::fill_n, std::max, std::min
#include <bit>        // std::bit_cast
#include <cmath>      // std::isfinite
#include <limits>     // std::numeric_limits

#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/memory/tile.hpp"
#include "kvmeld/score/codes.hpp"

namespace kvmeld::inline v0 {
namespace score {

/// Query heads per sweep at most; a larger group sweeps again.
inline constexpr index_t sweep_group = 16;

/// Queries as 16-bit codes times a power of two, one each: whole numbers below 32,768 are exact,
/// and what shares a power of two with them. Those of 8 bits would lose 256 times as much.
class rounded_queries {
 public:
  /// How many of `dim` numbers fit, 1 at least: the query heads of a sweep.
  static index_t most(index_t dim) {
    return std::min(detail::row_floats / padded(dim), sweep_group);
  }

  /// Of `q [queries, dim]`.
  void assign(const float* q, index_t queries, index_t dim) {
    queries_ = queries, row_ = padded(dim);
    for (index_t g = 0; g < queries; ++g) {
      std::int16_t* const codes = codes_ + std::ptrdiff_t{g} * row_;
      scales_[g] = round(q + std::ptrdiff_t{g} * dim, dim, codes);
      std::fill_n(codes + dim, row_ - dim, std::int16_t{0});
    }
  }

  index_t queries() const { return queries_; }
  index_t blocks() const { return row_ / q8_0::size; }
  /// Of query `g`, from block `b` on.
  const std::int16_t* codes(index_t g, index_t b) const {
    return codes_ + std::ptrdiff_t{g} * row_ + std::ptrdiff_t{b} * q8_0::size;
  }
  float scale(index_t g) const { return scales_[g]; }

 private:
  static index_t padded(index_t dim) { return row_size<q8_0>(dim) * q8_0::size; }

  /// Returns the scale, the least power of two with which no code exceeds 32,767: a number is off
  /// by half of it at most. With NaN or Inf the scale is NaN.
  static float round(const float* x, index_t n, std::int16_t* codes) {
    constexpr float least = 0x1p-100F;  // whose inverse is finite
    constexpr std::uint32_t exponent = 0x7f800000U;
    const float most = std::max(detail::largest_magnitude(x, n), least);
    if (!std::isfinite(most)) {
      std::fill_n(codes, n, std::int16_t{0});
      return std::numeric_limits<float>::quiet_NaN();
    }
    float scale = std::bit_cast<float>(std::bit_cast<std::uint32_t>(most) & exponent) * 0x1p-14F;
    scale *= most / scale < 32767.5F ? 1 : 2;
    for (index_t i = 0; i < n; ++i) {
      const float code = x[i] / scale;
      codes[i] = static_cast<std::int16_t>(code + (code < 0 ? -0.5F : 0.5F));
    }
    return scale;
  }

  alignas(detail::vector_bytes) std::int16_t codes_[detail::row_floats];
  float scales_[sweep_group];
  index_t queries_ = 0, row_ = 0;
};

inline namespace KVMELD_INSTRUCTIONS {

/// `q · k / scale`. The products of a block are summed in integers of 32 bits, numbers `i` of it in
/// the `i / 2 % 8`th of eight sums.
inline float dot_codes(const std::int16_t* q, const q8_0* k, index_t blocks) {
  float sum[8] = {};
  for (index_t b = 0; b < blocks; ++b, q += q8_0::size) {
    const float scale = k[b].scale_as_float();
    std::int32_t products[q8_0::size];  // of less than 2²²
    for (index_t i = 0; i < q8_0::size; ++i) {
      products[i] = std::int32_t{q[i]} * k[b].codes[i];
    }
    for (index_t i = 0; i < 8; ++i) {
      const std::int32_t* const x = products + std::ptrdiff_t{2} * i;
      sum[i] = detail::multiply_add(scale, static_cast<float>(x[0] + x[1] + x[16] + x[17]), sum[i]);
    }
  }
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

#ifdef KVMELD_AVX2_TARGET
/// 16 codes in 16 bits each.
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m256i wide_codes(const std::int8_t* codes) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
}

/// The 32 products of a block, in eight sums.
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m256i products_of(const q8_0& block,
                                                           const std::int16_t* q) {
  const auto* const x = reinterpret_cast<const __m256i*>(q);
  return _mm256_add_epi32(
      _mm256_madd_epi16(wide_codes(block.codes), _mm256_load_si256(x)),
      _mm256_madd_epi16(wide_codes(block.codes + 16), _mm256_load_si256(x + 1)));
}

/// The sum of each of eight packets.
KVMELD_AVX2_TARGET EIGEN_ALWAYS_INLINE __m256 sums_of(const __m256* x) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

/// `dots[g][r] = q_g · k_r / scale_g` of `Q` queries from `first` on and `R` keys from `s` on: as
/// `dot_codes`, to the bit. One key is read after the other, as memory is fetched best.
template <index_t Q, index_t R>
KVMELD_AVX2_TARGET KVMELD_NOINLINE void dot_block_of_codes(const rounded_queries& q, index_t first,
                                                           const code_rows& keys, index_t s,
                                                           float* dots, std::ptrdiff_t next) {
  __m256 sum[8];
  KVMELD_UNROLL_EARLY
  for (index_t i = 0; i < 8; ++i) {
    sum[i] = _mm256_setzero_ps();
  }
  KVMELD_UNROLL_EARLY
  for (index_t r = 0; r < R; ++r) {
    const q8_0* const key = keys[s + r];
    if (Q > 1 && first == 0) {
      keys.fetch(s + r, q.blocks());
    }
    for (index_t b = 0; b < q.blocks(); ++b) {
      const __m256 scale = scales_of(key[b]);
      KVMELD_UNROLL_EARLY
      for (index_t g = 0; g < Q; ++g) {
        const __m256 whole = _mm256_cvtepi32_ps(products_of(key[b], q.codes(first + g, b)));
        sum[g * R + r] = multiply_add_vectors(scale, whole, sum[g * R + r]);
      }
    }
  }
  float sums[8];
  _mm256_storeu_ps(sums, sums_of(sum));
  KVMELD_UNROLL_EARLY
  for (index_t g = 0; g < Q; ++g) {
    std::copy_n(sums + std::ptrdiff_t{g} * R, R, dots + g * next);
  }
}

/// ... of all keys.
template <index_t Q>
KVMELD_AVX2_TARGET void dot_all_codes(const rounded_queries& q, index_t first,
                                      const code_rows& keys, float* dots, std::ptrdiff_t next) {
  constexpr index_t together = 8 / Q;
  index_t s = 0;
  for (; s + together <= keys.count(); s += together) {
    dot_block_of_codes<Q, together>(q, first, keys, s, dots + s, next);
  }
  for (; s < keys.count(); ++s) {
    dot_block_of_codes<Q, 1>(q, first, keys, s, dots + s, next);
  }
}
#endif

/// `dots [queries, next] = q [queries, dim] · keysᵀ`, the first `keys.count()` of each row.
inline void qk_codes(const rounded_queries& q, const code_rows& keys, float* dots,
                     std::ptrdiff_t next) {
  index_t g = 0;
#ifdef KVMELD_AVX2_TARGET
  if (runs_avx2()) {
    for (; g + 4 <= q.queries(); g += 4) {
      dot_all_codes<4>(q, g, keys, dots + g * next, next);
    }
    for (; g + 2 <= q.queries(); g += 2) {
      dot_all_codes<2>(q, g, keys, dots + g * next, next);
    }
    for (; g < q.queries(); ++g) {
      dot_all_codes<1>(q, g, keys, dots + g * next, next);
    }
  }
#endif
  for (; g < q.queries(); ++g) {
    for (index_t s = 0; s < keys.count(); ++s) {
      dots[g * next + s] = dot_codes(q.codes(g, 0), keys[s], q.blocks());
    }
  }
  for (g = 0; g < q.queries(); ++g) {
    Eigen::Map<Eigen::ArrayXf>(dots + g * next, keys.count()) *= q.scale(g);
  }
}

}  // namespace KVMELD_INSTRUCTIONS
}  // namespace score
}  // namespace kvmeld::inline v0
