// SPDX-License-Identifier: MIT
/// Queries as attention over rows in 8 bits has them, by their formula.
#pragma once

#include <cmath>
#include <vector>

namespace oracle {

/// Each `dim` numbers as `c · d` with `d = max |x| / 32767` in float, `c` the nearest whole number
/// to `x / d`.
inline std::vector<float> in_16_bits(std::vector<float> x, int dim) {
  const auto n = static_cast<std::size_t>(dim);
  for (std::size_t first = 0; first < x.size(); first += n) {
    float most = 0;
    for (std::size_t i = first; i < first + n; ++i) {
      most = std::fmax(most, std::fabs(x[i]));
    }
    const float unit = most / 32767.0F;
    for (std::size_t i = first; i < first + n && unit > 0; ++i) {
      x[i] = std::round(x[i] / unit) * unit;
    }
  }
  return x;
}

}  // namespace oracle
