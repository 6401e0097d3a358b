// SPDX-License-Identifier: MIT
// What tests of divided budgets draw and sum.
#pragma once

#include <cmath>
#include <numeric>
#include <vector>

#include "oracle/budgets.hpp"
#include "support/fixtures.hpp"

namespace fixtures {

inline index_t sum(const std::vector<index_t>& budget) {
  return std::accumulate(budget.begin(), budget.end(), index_t{0});
}

inline index_t below(index_t n) {
  return std::uniform_int_distribution<index_t>(0, n - 1)(random_bits());
}

/// `[rows][columns]` positive numbers of very different sizes.
inline oracle::mat random_rows(index_t rows, index_t columns) {
  oracle::mat m;
  for (index_t r = 0; r < rows; ++r) {
    const auto x = normal(columns, 3);
    oracle::vec row;
    for (const float e : x) {
      row.push_back(std::exp(double{e}));
    }
    m.push_back(row);
  }
  return m;
}

template <class T>
std::vector<T> flat(const oracle::mat& m) {
  std::vector<T> x;
  for (const auto& row : m) {
    for (const double e : row) {
      x.push_back(static_cast<T>(e));
    }
  }
  return x;
}

}  // namespace fixtures
