// SPDX-License-Identifier: MIT
/// Numbers in 32 and 16 bits in a vector's register, as floats: exact, so that products of a row
/// have the same bits whichever of them hold it.
#pragma once

#include <Eigen/Core>
#include <bit>       // std::bit_cast
#include <concepts>  // std::same_as

#include "kvmeld/memory/row.hpp"

namespace kvmeld::inline v0::detail {
inline namespace KVMELD_INSTRUCTIONS {

using packet = Eigen::internal::packet_traits<float>::type;
inline constexpr index_t lanes = Eigen::internal::packet_traits<float>::size;

/// Number `i` of a row.
template <class Scalar>
float number(const Scalar* row, index_t i) {
  if constexpr (std::same_as<Scalar, float>) {
    return row[i];
  } else if constexpr (std::same_as<Scalar, Eigen::half>) {
    return half_bits_to_float(row[i].x);
  } else {
    return std::bit_cast<float>(std::uint32_t{row[i].value} << 16);  // of an Eigen::bfloat16
  }
}

// `[lanes]` numbers of a storage. Without an instruction for them there is none here.
EIGEN_ALWAYS_INLINE packet widened(const float* x) { return Eigen::internal::ploadu<packet>(x); }
#if defined(EIGEN_VECTORIZE_AVX512)
EIGEN_ALWAYS_INLINE packet widened(const Eigen::half* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
EIGEN_ALWAYS_INLINE packet widened(const Eigen::bfloat16* x) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
#elif defined(EIGEN_VECTORIZE_AVX2) && defined(__F16C__)
EIGEN_ALWAYS_INLINE packet widened(const Eigen::half* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
EIGEN_ALWAYS_INLINE packet widened(const Eigen::bfloat16* x) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
#elif defined(EIGEN_VECTORIZE_AVX) && defined(__F16C__)
EIGEN_ALWAYS_INLINE packet widened(const Eigen::half* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
#elif defined(EIGEN_VECTORIZE_SSE) && !defined(EIGEN_VECTORIZE_AVX)
EIGEN_ALWAYS_INLINE packet widened(const Eigen::bfloat16* x) {
  const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
  return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), bits));
}
#elif defined(EIGEN_VECTORIZE_NEON) && defined(__aarch64__)
EIGEN_ALWAYS_INLINE packet widened(const Eigen::half* x) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(x))));
}
EIGEN_ALWAYS_INLINE packet widened(const Eigen::bfloat16* x) {
  const uint16x4_t bits = vld1_u16(reinterpret_cast<const std::uint16_t*>(x));
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(bits), 16));
}
#endif

/// Storages whose numbers an instruction widens; others are converted one by one.
template <class Scalar>
concept widens = requires(const Scalar* x) {
  widened(x);
};

/// What is `bytes` behind `x`: rows of any storage lie at any distance.
template <class T>
const T* behind(const T* x, std::ptrdiff_t bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(x) + bytes);
}

}  // namespace KVMELD_INSTRUCTIONS
}  // namespace kvmeld::inline v0::detail
