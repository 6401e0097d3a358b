// SPDX-License-Identifier: MIT
/// Blocks of numbers in 4 bits.
#pragma once

#include <Eigen/Core>  // Eigen::half
#include <algorithm>   // std::min
#include <bit>         // std::bit_cast
#include <cmath>       // std::isfinite
#include <limits>      // std::numeric_limits

#include "kvmeld/memory/half.hpp"

namespace kvmeld::inline v0 {

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
