// SPDX-License-Identifier: MIT
// What a layer's attention computes of a query and a key, for the query heads of one KV head:
//
//     logit = cap(scale q.k) + slope_g (position - at) + log-mass      cap(x) = c tanh(x / c), or x
//     p     = exp(logit) / (exp(sink_g) + sum exp(logit))
//
// over slots at positions up to `at`, the query's own, and after at - window. The log-sum-exp is of
// all logits, the sink's included.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <vector>

namespace oracle {

using vec = std::vector<double>;
using mat = std::vector<vec>;     // [rows][columns]
using tensor = std::vector<mat>;  // queries: [n][group][dim]

inline double dot(const vec& a, const vec& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

struct terms {
  double scale = 1;
  double cap = 0;   // of the logits, 0: none
  vec sinks = {};   // [group] logits of a mass that no slot has; empty: none
  vec slopes = {};  // [group]; empty: none
  int window = 0;   // positions that a query sees, its own included; 0: all

  /// A query that stands for others has no position: nothing may hang on it.
  static constexpr int nowhere = std::numeric_limits<int>::min();

  /// cap(scale q.k)
  double alike(const vec& q, const vec& k) const {
    const double x = scale * dot(q, k);
    return cap > 0 ? cap * std::tanh(x / cap) : x;
  }
  /// slope (position - at); `row` of rows that belong to the group's heads in turn.
  double bias(std::size_t row, int position, int at) const {
    if (slopes.empty()) return 0;
    if (at == nowhere)
      throw std::invalid_argument("oracle: expected a query's position for slopes");
    return slopes[row % slopes.size()] * (position - at);
  }
  double sink(std::size_t row) const {
    return sinks.empty() ? -std::numeric_limits<double>::infinity() : sinks[row % sinks.size()];
  }
  bool sees(int at, int position) const {
    return position <= at && (window == 0 || position > at - window);
  }
};

/// Softmax of `logits` over the slots that are `visible`, and of `sink`, which none of them has; a
/// query that sees no slot gives zeros.
inline vec softmax(const vec& logits, const std::vector<bool>& visible, double& lse,
                   double sink = -std::numeric_limits<double>::infinity()) {
  double top = sink;
  for (std::size_t j = 0; j < logits.size(); ++j)
    if (visible[j]) top = std::max(top, logits[j]);
  vec a(logits.size(), 0.0);
  lse = top;
  if (!std::isfinite(top)) return a;
  double sum = std::exp(sink - top);
  for (std::size_t j = 0; j < logits.size(); ++j)
    if (visible[j]) sum += a[j] = std::exp(logits[j] - top);
  for (double& x : a) x /= sum;
  lse = top + std::log(sum);
  return a;
}

}  // namespace oracle
