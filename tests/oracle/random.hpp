// SPDX-License-Identifier: MIT
// Random numbers for the oracle's tests.
#pragma once

#include "oracle/attention.hpp"
#include "support/random.hpp"

namespace oracle {

/// Independent standard normal numbers.
inline vec normal(int n) {
  std::normal_distribution<double> gauss;
  vec x(static_cast<std::size_t>(n));
  for (double& e : x) e = gauss(streams::doubles);
  return x;
}

inline mat normal(int rows, int n) {
  mat x;
  for (int i = 0; i < rows; ++i) x.push_back(normal(n));
  return x;
}

inline head random_head(int tokens, int dim, int group) {
  head h = oracle::make_head(dim, group);
  for (int t = 0; t < tokens; ++t) append(h, normal(dim), normal(dim));
  return h;
}

inline tensor random_queries(int n, int group, int dim) {
  tensor q;
  for (int t = 0; t < n; ++t) q.push_back(normal(group, dim));
  return q;
}

}  // namespace oracle
