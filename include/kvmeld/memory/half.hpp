// SPDX-License-Identifier: MIT
/// Numbers in 16 bits as floats.
#pragma once

#include <bit>  // std::bit_cast
#include <cstdint>

#include "kvmeld/config.hpp"

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

}  // namespace kvmeld::inline v0
