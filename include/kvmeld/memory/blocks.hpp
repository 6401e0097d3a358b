// SPDX-License-Identifier: MIT
/// Numbers in 16 bits as floats, and blocks of numbers in 8 and 4 bits.
#pragma once

#include <Eigen/Core>  // Eigen::half
#include <algorithm>   // std::min, std::max
#include <bit>         // std::bit_cast
#include <cmath>       // std::isfinite
#include <limits>      // std::numeric_limits

#include "kvmeld/detail/arithmetic.hpp"

namespace kvmeld::inline v0 {

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
    q8_0 block;
    block.scale = static_cast<Eigen::half>(detail::largest_magnitude(x, size) / 127.0F);
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

/// 32 numbers: number `i` is `(code_i − 8) · scale`, codes 0 to 15. The largest magnitude has code
/// 0, so the scale is that number divided by −8, in half: a number is off by half a scale, one at
/// the other end by a scale (and the scale by its rounding). As ggml's `block_q4_0` lies. NaN and
/// Inf, or a number beyond 524 thousand, make the block NaN whole. Of values, what lies in the
/// blocks is rotated: rows that an engine has not rotated are not read as they are.
struct q4_0 {
  static constexpr index_t size = 32;

  Eigen::half scale = {};
  std::uint8_t codes[size / 2] = {};  ///< numbers `i` (lower 4 bits) and `i + 16`

  float operator[](index_t i) const {
    return number(codes[i % (size / 2)] >> (i < size / 2 ? 0 : 4), scale_as_float());
  }
  float scale_as_float() const { return detail::half_bits_to_float(scale.x); }
  /// The number of the code in the lower 4 bits.
  static float number(int code, float scale) { return scale * static_cast<float>((code & 15) - 8); }

  /// Of `x [size]`.
  static q4_0 of(const float* x) {
    constexpr std::uint32_t magnitude = 0x7fffffffU;
    std::uint32_t most = 0;  // magnitudes order as their bits do, Inf and NaN above all numbers
    for (index_t i = 0; i < size; ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(x[i]);
      most = (bits & magnitude) > (most & magnitude) ? bits : most;
    }
    q4_0 block;
    const float scale = std::bit_cast<float>(most) / -8.0F;
    block.scale = static_cast<Eigen::half>(scale);
    const float held = block.scale_as_float();
    block.scale = held == 0 ? Eigen::half{} : block.scale;  // without a sign
    if (!std::isfinite(held)) {
      block.scale = std::numeric_limits<Eigen::half>::quiet_NaN();
      return block;
    }
    // By the scale before it is rounded: the largest magnitude has code 0, and a block that is
    // stored again stays as it is. The sum is above 0, where a conversion rounds down.
    const auto code = [&](float e) {
      return held == 0 ? 8 : std::min(static_cast<int>(e / scale + 8.5F), 15);
    };
    for (index_t i = 0; i < size / 2; ++i) {
      block.codes[i] = static_cast<std::uint8_t>(code(x[i]) | code(x[i + size / 2]) << 4);
    }
    return block;
  }
};

static_assert(sizeof(q4_0) == 18);

}  // namespace kvmeld::inline v0
