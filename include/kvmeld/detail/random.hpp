// SPDX-License-Identifier: MIT
/// Random numbers that depend on seed and position alone.
#pragma once

#include <cstdint>  // std::uint64_t

#include "kvmeld/config.hpp"

namespace kvmeld {
inline namespace v0 {
namespace detail {

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
}  // namespace v0
}  // namespace kvmeld
