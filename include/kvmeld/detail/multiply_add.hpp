/// Sums that round the same in every copy that a compiler makes.
#pragma once

#include <cmath>  // std::fma

namespace kvmeld {
inline namespace v0 {
namespace detail {

/// `a · b + c`, rounded once on a processor that can, and twice on one that cannot. Left to the
/// compiler, one copy of a function may round otherwise than another. A device has its own.
inline float multiply_add(float a, float b, float c) {
#ifdef FP_FAST_FMAF
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

}  // namespace detail
}  // namespace v0
}  // namespace kvmeld
