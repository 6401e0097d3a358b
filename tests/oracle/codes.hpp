// SPDX-License-Identifier: MIT
/// Queries as attention over rows in 8 bits has them, by their formula.
#pragma once

#include <cmath>
#include <vector>

namespace oracle {

/// Each `dim` numbers as `c · 2ᵉ` with the least `e` for which no `|c|` exceeds 32767, `c` the
/// nearest whole number to `x / 2ᵉ`.
inline std::vector<float> in_16_bits(std::vector<float> x, int dim) {
  const auto n = static_cast<std::size_t>(dim);
  for (std::size_t first = 0; first < x.size(); first += n) {
    double most = 0;
    for (std::size_t i = first; i < first + n; ++i) {
      most = std::fmax(most, std::fabs(double{x[i]}));
    }
    double unit = 0x1p-140;
    while (std::isfinite(most) && std::round(most / unit) > 32767) {
      unit *= 2;
    }
    for (std::size_t i = first; i < first + n; ++i) {
      x[i] = static_cast<float>(std::round(double{x[i]} / unit) * unit);
    }
  }
  return x;
}

}  // namespace oracle
