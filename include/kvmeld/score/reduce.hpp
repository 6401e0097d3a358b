// SPDX-License-Identifier: MIT
/// How the sums over rows are made: of which rows in turn, over the lanes of several packets at
/// once, in less than half the instructions of one by one, and over what no packet holds.
#pragma once

#include <Eigen/Core>
#include <cmath>     // std::sqrt
#include <concepts>  // std::same_as

#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/memory/convert.hpp"

namespace kvmeld::inline v0 {
namespace score {

/// A buffer of an aligned array. Of whole vectors every element takes the same path, so that a
/// result does not depend on where in memory, or at which index, a number stands.
using aligned_block = Eigen::Map<Eigen::Array<float, Eigen::Dynamic, 1>, detail::vector_bytes>;

inline namespace KVMELD_INSTRUCTIONS {

using detail::lanes;
using detail::packet;

/// Sums that are reduced together.
inline constexpr index_t reduced = 8;
// `sums[r] = predux(x[r])`, to the bit, of eight packets at once: halves of two are added in one,
// until a number of each is left.
#if defined(EIGEN_VECTORIZE_AVX512DQ)  // without DQ, predux adds in another order
EIGEN_ALWAYS_INLINE void reduce(const packet* x, float* sums) {
  const auto halves = [](packet a, packet b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  };
  const auto quarters = [](packet a, packet b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  };
  const packet a = quarters(halves(x[0], x[1]), halves(x[2], x[3]));
  const packet b = quarters(halves(x[4], x[5]), halves(x[6], x[7]));
  const packet pairs = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
  const packet all = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0xB1));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm256_storeu_ps(sums, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, all)));
}
#elif defined(EIGEN_VECTORIZE_AVX2) && !defined(EIGEN_VECTORIZE_AVX512)
EIGEN_ALWAYS_INLINE void reduce(const packet* x, float* sums) {
  const auto halves = [](packet a, packet b) {
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  };
  const auto pairs = [](packet a, packet b) {
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xEE));
  };
  const packet a = pairs(halves(x[0], x[1]), halves(x[2], x[3]));
  const packet b = pairs(halves(x[4], x[5]), halves(x[6], x[7]));
  const packet all = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_ps(sums, _mm256_permutevar8x32_ps(all, order));
}
#else
EIGEN_ALWAYS_INLINE void reduce(const packet* x, float* sums) {
  KVMELD_UNROLL_EARLY
  for (index_t r = 0; r < reduced; ++r) {
    sums[r] = Eigen::internal::predux(x[r]);
  }
}
#endif

/// Sums that are kept in registers at a time: half of them, the rest hold what is multiplied.
inline constexpr index_t sums_at_once = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32 ? 16 : 8;

/// Of `R` rows, those whose packets are multiplied in turn. Where a vector is a whole line, floats
/// are computed with sooner than they are read, and a processor fetches best what is read row by
/// row.
template <class Scalar, index_t R>
inline constexpr index_t rows_together = std::same_as<Scalar, float>&& lanes * sizeof(float) >= 64
                                             ? 1
                                             : R;

/// A packet that is multiplied several times. g++ would load it for each product anew.
EIGEN_ALWAYS_INLINE packet loaded(const float* x) {
  packet once = Eigen::internal::ploadu<packet>(x);
#if defined(__GNUC__) && !defined(__clang__)
  EIGEN_OPTIMIZATION_BARRIER(once);
#endif
  return once;
}

/// `x [n] ← √x`, rounded as by `std::sqrt`, which compilers call one by one: it may set errno.
inline void take_roots(float* x, index_t n) {
  index_t i = 0;
#if defined(EIGEN_VECTORIZE_SSE)
  for (; i + 4 <= n; i += 4) {
    _mm_storeu_ps(x + i, _mm_sqrt_ps(_mm_loadu_ps(x + i)));
  }
#endif
  for (; i < n; ++i) {
    x[i] = std::sqrt(x[i]);
  }
}

/// `sum` and the products of the elements that no packet holds.
template <class Scalar>
float with_rest(float sum, const float* x, const Scalar* y, index_t i, index_t dim) {
  for (; i < dim; ++i) {
    sum = detail::multiply_add(x[i], detail::number(y, i), sum);
  }
  return sum;
}

}  // namespace KVMELD_INSTRUCTIONS
}  // namespace score
}  // namespace kvmeld::inline v0
