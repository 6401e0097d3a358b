// SPDX-License-Identifier: MIT
// How clear the oracle's decisions were. Where it finds two numbers all but equal, a library that
// computes in float may find them the other way round, on this processor or on another, and be as
// right: data for a comparison are drawn until no decision is that close (fixtures::clearly).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

namespace oracle {

/// The least margin of all decisions since it was set to infinity.
inline double least_margin = std::numeric_limits<double>::infinity();

/// The unit of numbers that no arithmetic has rounded: any difference is clear.
inline constexpr double exact = -1;

/// Something hangs on which of the two is larger. The margin is relative, or in `unit`s: 1 for
/// logarithms and cosines, which may be 0. Numbers equal in double were made equal: they tie.
inline void decided(double a, double b, double unit = 0) {
  if (a == b || unit == exact) return;
  const double scale = unit > 0 ? unit : std::max(std::abs(a), std::abs(b));
  least_margin = std::min(least_margin, std::abs(a - b) / scale);
}

}  // namespace oracle
