// SPDX-License-Identifier: MIT
/// A mean of some samples, and how sure it is.
#pragma once

#include <cmath>  // std::sqrt
#include <optional>
#include <span>

namespace evaluate {

struct estimate {
  double mean = 0;
  std::optional<double> error = {};  ///< its standard error; none: there was one sample
};

/// Of samples that do not depend on one another; summed in order.
inline estimate estimate_of(std::span<const double> samples) {
  const auto n = static_cast<double>(samples.size());
  estimate e;
  for (const double x : samples) {
    e.mean += x / n;
  }
  if (samples.size() > 1) {
    double squares = 0;
    for (const double x : samples) {
      squares += (x - e.mean) * (x - e.mean);
    }
    e.error = std::sqrt(squares / (n - 1) / n);
  }
  return e;
}

}  // namespace evaluate
