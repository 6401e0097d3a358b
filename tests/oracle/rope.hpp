// SPDX-License-Identifier: MIT
// Rotary position embedding (RoFormer, arXiv 2104.09864, eq. 34) in the two layouts in use.
#pragma once

#include <optional>

#include "oracle/attention.hpp"

namespace oracle {

struct llama3_scaling {
  double factor = 8, low = 1, high = 4, original_context = 8192;
};

struct rope {
  double base = 10000;
  bool interleaved = false;  // pairs (2i, 2i+1), else (i, i + dim/2)
  std::optional<llama3_scaling> llama3 = std::nullopt;
};

/// Radians a position for pair `i` of `dim / 2`: theta_i = base^(-2i/dim).
inline double frequency(const rope& r, int i, int dim) {
  const double theta = std::pow(r.base, -2.0 * i / dim);
  if (!r.llama3) return theta;
  // Llama 3.1: long waves are slowed by `factor`, short ones left alone, a ramp in between.
  const double wave = 2 * std::acos(-1.0) / theta;
  const double turns = r.llama3->original_context / wave;
  if (turns < r.llama3->low) return theta / r.llama3->factor;
  if (turns > r.llama3->high) return theta;
  const double ramp = (turns - r.llama3->low) / (r.llama3->high - r.llama3->low);
  return (1 - ramp) * theta / r.llama3->factor + ramp * theta;
}

/// The first `dim` numbers of `x` rotated on by `positions` (back when negative); dim 0: all of
/// them.
inline vec rotated(const vec& x, double positions, const rope& r, int dim = 0) {
  const int d = dim > 0 ? dim : static_cast<int>(x.size());
  vec y = x;
  for (int i = 0; i < d / 2; ++i) {
    const auto a = static_cast<std::size_t>(r.interleaved ? 2 * i : i);
    const auto b = static_cast<std::size_t>(r.interleaved ? 2 * i + 1 : i + d / 2);
    const double angle = positions * frequency(r, i, d);
    y[a] = x[a] * std::cos(angle) - x[b] * std::sin(angle);
    y[b] = x[a] * std::sin(angle) + x[b] * std::cos(angle);
  }
  return y;
}

}  // namespace oracle
