// SPDX-License-Identifier: MIT
// Data for comparing with the oracle: nothing hangs on rounding.
#pragma once

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "oracle/margin.hpp"

namespace fixtures {

/// What `draw()` draws, and whether all that the oracle decided meanwhile was clear: by a thousand
/// times what a float is off, or more.
template <class Draw>
auto drawn(Draw draw, double clear = 1e-4) {
  oracle::least_margin = std::numeric_limits<double>::infinity();
  auto data = draw();
  return std::pair(data, oracle::least_margin >= clear);
}

/// Draws until the oracle's decisions are clear. `draw()` draws data and runs the oracle on them.
template <class Draw>
auto clearly(Draw draw) {
  for (int tries = 0;; ++tries) {
    const auto [data, clear] = drawn(draw);
    if (clear) {
      return data;
    }
    REQUIRE(tries < 100);
  }
}

/// As many steps, each `draw(before)`, where `before` is the step before (`start` at first), the
/// oracle's head after it in it. Where none of ten is clear, as which slot is removed and which it
/// is like was decided long ago, it goes back, each time twice as far. Fewer steps: there is no way
/// on from `start`.
template <class Step, class Draw>
std::vector<Step> clear_steps(std::size_t count, const Step& start, Draw draw,
                              double clear = 1e-4) {
  std::vector<Step> steps;
  std::size_t furthest = 0, back = 4;
  int failed = 0;
  for (std::size_t tries = 0; steps.size() < count; ++tries) {
    if (tries == 200 + 20 * count) {
      return {};
    }
    const auto [next, is_clear] =
        drawn([&] { return draw(steps.empty() ? start : steps.back()); }, clear);
    if (is_clear) {
      steps.push_back(next);
      failed = 0;
      if (steps.size() > furthest) {
        furthest = steps.size(), back = 4;
      }
    } else if (++failed == 10) {
      steps.erase(steps.end() - static_cast<std::ptrdiff_t>(std::min(back, steps.size())),
                  steps.end());
      failed = 0, back *= 2;
    }
  }
  return steps;
}

}  // namespace fixtures
