// SPDX-License-Identifier: MIT
/// Q8_0, ggml's format: 32 numbers in int8 with one scale, 34 bytes.
#pragma once

#include <Eigen/Core>  // Eigen::half
#include <algorithm>   // std::min, std::max
#include <bit>         // std::bit_cast
#include <cmath>       // std::isfinite
#include <cstdint>     // std::int8_t, std::uint32_t
#include <limits>      // std::numeric_limits

#include "kvmeld/config.hpp"

namespace kvmeld {
inline namespace v0 {

namespace detail {

/// IEEE binary16. Without branches, so that compilers take many at a time (Eigen 3.4 takes one, by
/// instructions that it finds with clang only). No step makes a denormal float: a process that
/// flushes these to 0 (FTZ, DAZ), as one linked with -ffast-math does, gets the same numbers.
inline float half_bits_to_float(std::uint16_t half) {
  constexpr std::int32_t one = 1 << 23, raise = 224 * one;  // NaN and Inf as a float has them
  const std::int32_t shifted = (half & 0x7FFF) << 13;
  // A denormal half is the fraction behind a 1 that is taken away again.
  const std::int32_t is_denormal = shifted < one ? -1 : 0;
  const float raised = std::bit_cast<float>(shifted + raise + (is_denormal & one)) -
                       std::bit_cast<float>(is_denormal & (raise + one));
  const auto magnitude = std::bit_cast<std::uint32_t>(raised * 0x1p-112F);
  return std::bit_cast<float>(magnitude | (half & 0x8000U) << 16);
}

}  // namespace detail

/// 32 numbers: number `i` is `codes[i] · scale`. Symmetric: the scale is the largest magnitude
/// divided by 127, in half, so a number is off by half a scale (and the scale by its rounding).
/// Bit for bit what ggml calls `block_q8_0`: rows of a cache in `GGML_TYPE_Q8_0` are read in place.
/// A block has no code for NaN and Inf, nor for numbers beyond 8.3 million: with one it is NaN
/// whole.
struct q8_0 {
  static constexpr index_t size = 32;

  Eigen::half scale = {};
  std::int8_t codes[size] = {};

  float operator[](index_t i) const { return static_cast<float>(codes[i]) * scale_as_float(); }
  float scale_as_float() const { return detail::half_bits_to_float(scale.x); }

  /// Of `x [size]`.
  static q8_0 of(const float* x) {
    std::uint32_t bits = 0;  // magnitudes order as their bits do, Inf and NaN above all numbers
    for (index_t i = 0; i < size; ++i) {
      bits = std::max(bits, std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffU);
    }
    const auto most = std::bit_cast<float>(bits);
    q8_0 block;
    block.scale = static_cast<Eigen::half>(most / 127.0F);
    const float scale = block.scale_as_float();
    if (!std::isfinite(scale)) {
      block.scale = std::numeric_limits<Eigen::half>::quiet_NaN();
      return block;
    }
    if (scale == 0) {
      return block;
    }
    // By division: the inverse of a tiny scale would be infinite.
    for (index_t i = 0; i < size; ++i) {
      // To the nearest, halves away from zero: std::lround is not compiled to vectors. Below 256:
      // the least scale that is not 0 is at least two thirds of what it was rounded from.
      const float ratio = x[i] / scale;
      const auto whole = static_cast<int>(ratio);
      const float rest = ratio - static_cast<float>(whole);
      const int code = whole + (rest >= 0.5F ? 1 : 0) - (rest <= -0.5F ? 1 : 0);
      block.codes[i] = static_cast<std::int8_t>(std::min(std::max(code, -127), 127));
    }
    return block;
  }
};

static_assert(sizeof(q8_0) == 34);

}  // namespace v0
}  // namespace kvmeld
