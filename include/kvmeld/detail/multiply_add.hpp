// SPDX-License-Identifier: MIT
/// Sums that round the same in every copy that a compiler makes.
#pragma once

#include <cmath>  // std::fma

#include "kvmeld/config.hpp"

namespace kvmeld {
inline namespace v0 {
namespace detail {
inline namespace KVMELD_INSTRUCTIONS {

/// `a · b + c`, rounded once on a processor that can, and twice on one that cannot. Left to the
/// compiler, one copy of a function may round otherwise than another. A device has its own.
inline float multiply_add(float a, float b, float c) {
#ifdef FP_FAST_FMAF
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

}  // namespace KVMELD_INSTRUCTIONS
}  // namespace detail
}  // namespace v0
}  // namespace kvmeld
