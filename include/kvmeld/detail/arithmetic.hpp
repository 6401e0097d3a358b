// SPDX-License-Identifier: MIT
/// Arithmetic whose bits depend on its arguments alone.
#pragma once

#include <algorithm>  // std::max
#include <bit>        // std::bit_cast
#include <cmath>      // std::fma
#include <cstdint>    // std::uint64_t

#include "kvmeld/config.hpp"

namespace kvmeld::inline v0 {
namespace detail {

/// Where arrays begin that are computed at a vector's width, and what Eigen is told of them, in
/// bytes: it sums differently aligned memory in different orders. Not
/// `EIGEN_MAX_STATIC_ALIGN_BYTES` and `AlignedMax`: a program may set these apart.
inline constexpr int vector_bytes = 64;

inline namespace KVMELD_INSTRUCTIONS {

/// `a · b + c`, rounded once on a processor that can, and twice on one that cannot. Left to the
/// compiler, one copy of a function may round otherwise than another. A device has its own.
inline float multiply_add(float a, float b, float c) {
#if KVMELD_HAS_FMA
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

}  // namespace KVMELD_INSTRUCTIONS

/// The largest magnitude of `x [n]`; with NaN or Inf, one of them. Magnitudes order as their bits
/// do, Inf and NaN above all numbers.
inline float largest_magnitude(const float* x, index_t n) {
  std::uint32_t most = 0;
  for (index_t i = 0; i < n; ++i) {
    most = std::max(most, std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffU);
  }
  return std::bit_cast<float>(most);
}

/// In [0, 1), from a seed and a token's position alone: splitmix64's finaliser (Steele et al.
/// 2014), the upper 24 bits, which a float holds exactly.
inline float unit_random(std::uint64_t seed, index_t position) {
  std::uint64_t z = seed + static_cast<std::uint64_t>(position) * 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  z = z ^ (z >> 31);
  return static_cast<float>(z >> 40) / static_cast<float>(1 << 24);
}

}  // namespace detail
}  // namespace kvmeld::inline v0
