// SPDX-License-Identifier: MIT
// Non-negative least squares: min |a x - b|^2 over x >= 0, by Lawson and Hanson's active sets.
#pragma once

#include "oracle/linear.hpp"

namespace oracle {

/// Least squares by Householder reflections: the x of least |a x - b|; a [rows][columns] with
/// columns <= rows. A column that depends on the ones before it gets 0.
inline vec least_squares(mat a, vec b) {
  const std::size_t rows = a.size(), columns = rows == 0 ? 0 : a[0].size();
  double largest = 0;
  for (const vec& row : a)
    for (double e : row) largest = std::max(largest, std::abs(e));
  std::vector<bool> independent(columns, false);
  std::vector<std::size_t> row_of(columns, 0);
  std::size_t r = 0;
  for (std::size_t c = 0; c < columns && r < rows; ++c) {
    double norm = 0;
    for (std::size_t i = r; i < rows; ++i) norm += a[i][c] * a[i][c];
    norm = std::sqrt(norm);
    if (norm <= 1e-13 * largest) continue;
    vec u(rows, 0.0);
    for (std::size_t i = r; i < rows; ++i) u[i] = a[i][c];
    u[r] += u[r] >= 0 ? norm : -norm;
    const double uu = dot(u, u);
    const auto reflect = [&](auto&& at) {
      double s = 0;
      for (std::size_t i = r; i < rows; ++i) s += u[i] * at(i);
      for (std::size_t i = r; i < rows; ++i) at(i) -= 2 * s / uu * u[i];
    };
    for (std::size_t j = c; j < columns; ++j)
      reflect([&](std::size_t i) -> double& { return a[i][j]; });
    reflect([&](std::size_t i) -> double& { return b[i]; });
    independent[c] = true;
    row_of[c] = r++;
  }
  vec x(columns, 0.0);
  for (std::size_t c = columns; c-- > 0;) {
    if (!independent[c]) continue;
    double sum = b[row_of[c]];
    for (std::size_t j = c + 1; j < columns; ++j) sum -= a[row_of[c]][j] * x[j];
    x[c] = sum / a[row_of[c]][c];
  }
  return x;
}

/// Minus half the gradient: a^T (b - a x).
inline vec nnls_gain(const mat& a, const vec& b, const vec& x) {
  vec rest = b;
  for (std::size_t i = 0; i < rest.size(); ++i) rest[i] -= dot(a[i], x);
  return times(transposed(a), rest);
}

/// How far x is from what Karush, Kuhn and Tucker ask of the minimum, 0 being there: x >= 0,
/// w = a^T (b - a x) <= 0, and w = 0 where x > 0. In units of the largest |a^T b|.
inline double nnls_violation(const mat& a, const vec& b, const vec& x) {
  const vec w = nnls_gain(a, b, x), start = nnls_gain(a, b, vec(x.size(), 0.0));
  double unit = 1e-300, worst = 0;
  for (double e : start) unit = std::max(unit, std::abs(e));
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (!(x[i] >= 0)) return std::numeric_limits<double>::infinity();
    worst = std::max(worst, (x[i] > 0 ? std::abs(w[i]) : std::max(w[i], 0.0)) / unit);
  }
  return worst;
}

/// Lawson and Hanson (1974), chapter 23. a [rows][columns], b [rows]; x [columns].
inline vec nnls(const mat& a, const vec& b) {
  const std::size_t n = a.empty() ? 0 : a[0].size();
  vec x(n, 0.0);
  std::vector<bool> passive(n, false), refused(n, false);
  double unit = 0;
  for (double e : nnls_gain(a, b, x)) unit = std::max(unit, std::abs(e));
  // The least-squares solution with all but the passive columns at 0.
  const auto solution = [&] {
    mat part;
    for (const vec& row : a) {
      part.emplace_back();
      for (std::size_t j = 0; j < n; ++j)
        if (passive[j]) part.back().push_back(row[j]);
    }
    const vec found = least_squares(part, b);
    vec s(n, 0.0);
    for (std::size_t j = 0, c = 0; j < n; ++j)
      if (passive[j]) s[j] = found[c++];
    return s;
  };
  for (std::size_t round = 0; round < 10 * n + 10; ++round) {
    const vec w = nnls_gain(a, b, x);
    std::size_t best = n;
    for (std::size_t j = 0; j < n; ++j)
      if (!passive[j] && !refused[j] && w[j] > 1e-13 * unit && (best == n || w[j] > w[best]))
        best = j;
    if (best == n) return x;
    passive[best] = true;
    vec s = solution();
    if (s[best] <= 0) {  // rounding: the column gains nothing after all
      passive[best] = false;
      refused[best] = true;
      continue;
    }
    std::fill(refused.begin(), refused.end(), false);
    while (true) {
      double step = 1;  // as far towards s as stays non-negative
      for (std::size_t j = 0; j < n; ++j)
        if (passive[j] && s[j] <= 0) step = std::min(step, x[j] / (x[j] - s[j]));
      bool inside = true;
      for (std::size_t j = 0; j < n; ++j) {
        if (!passive[j]) continue;
        const bool blocks = s[j] <= 0 && x[j] / (x[j] - s[j]) <= step;
        x[j] += step * (s[j] - x[j]);
        if (blocks) {
          passive[j] = inside = false;
          x[j] = 0;
        }
      }
      if (inside) break;
      s = solution();
    }
  }
  return x;
}

}  // namespace oracle
