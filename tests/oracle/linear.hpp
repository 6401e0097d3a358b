// SPDX-License-Identifier: MIT
// Small dense linear algebra, by the book: elimination, Cholesky.
#pragma once

#include "oracle/attention.hpp"

namespace oracle {

inline mat zeros(std::size_t rows, std::size_t columns) { return mat(rows, vec(columns, 0.0)); }

inline mat transposed(const mat& a) {
  if (a.empty()) return {};
  mat t = zeros(a[0].size(), a.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    for (std::size_t j = 0; j < a[i].size(); ++j) t[j][i] = a[i][j];
  return t;
}

/// a b, [rows of a][columns of b]
inline mat times(const mat& a, const mat& b) {
  mat c = zeros(a.size(), b.empty() ? 0 : b[0].size());
  for (std::size_t i = 0; i < a.size(); ++i)
    for (std::size_t t = 0; t < b.size(); ++t)
      for (std::size_t j = 0; j < c[i].size(); ++j) c[i][j] += a[i][t] * b[t][j];
  return c;
}

inline vec times(const mat& a, const vec& x) {
  vec y;
  for (const vec& row : a) y.push_back(dot(row, x));
  return y;
}

inline double squared_distance(const vec& a, const vec& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

/// Solves a x = b, for every column of b, by elimination with row pivots.
inline mat solve(mat a, mat b) {
  const std::size_t n = a.size();
  for (std::size_t c = 0; c < n; ++c) {
    std::size_t pivot = c;
    for (std::size_t r = c; r < n; ++r)
      if (std::abs(a[r][c]) > std::abs(a[pivot][c])) pivot = r;
    if (a[pivot][c] == 0) throw std::invalid_argument("oracle: expected a regular matrix");
    std::swap(a[c], a[pivot]);
    std::swap(b[c], b[pivot]);
    for (std::size_t r = c + 1; r < n; ++r) {
      const double f = a[r][c] / a[c][c];
      if (f == 0) continue;
      for (std::size_t j = c; j < n; ++j) a[r][j] -= f * a[c][j];
      for (std::size_t j = 0; j < b[r].size(); ++j) b[r][j] -= f * b[c][j];
    }
  }
  for (std::size_t r = n; r-- > 0;)
    for (std::size_t j = 0; j < b[r].size(); ++j) {
      for (std::size_t c = r + 1; c < n; ++c) b[r][j] -= a[r][c] * b[c][j];
      b[r][j] /= a[r][r];
    }
  return b;
}

inline vec solve(const mat& a, const vec& b) {
  mat column;
  for (double x : b) column.push_back({x});
  vec x;
  for (const vec& row : solve(a, column)) x.push_back(row[0]);
  return x;
}

/// Lower triangular l with l l^T = a, for a positive definite.
inline mat cholesky(const mat& a) {
  const std::size_t n = a.size();
  mat l = zeros(n, n);
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = 0; j <= i; ++j) {
      double sum = a[i][j];
      for (std::size_t t = 0; t < j; ++t) sum -= l[i][t] * l[j][t];
      if (i == j && sum <= 0)
        throw std::invalid_argument("oracle: expected a positive definite matrix");
      l[i][j] = i == j ? std::sqrt(sum) : sum / l[j][j];
    }
  return l;
}

/// Ridge least squares: the x nearest `x0` in the sense of
///   min |a x - b|^2 + l |x - x0|^2,  l = `ridge` times the trace of a^T a.
/// a [rows][n], b [rows][columns], x0 [n][columns].
inline mat ridge_around(const mat& a, const mat& b, const mat& x0, double ridge) {
  const mat at = transposed(a), guess = times(a, x0);
  mat rest = b;
  for (std::size_t i = 0; i < b.size(); ++i)
    for (std::size_t j = 0; j < b[i].size(); ++j) rest[i][j] -= guess[i][j];
  mat normal_matrix = times(at, a);
  double trace = 0;
  for (std::size_t i = 0; i < normal_matrix.size(); ++i) trace += normal_matrix[i][i];
  const double l = ridge * trace;
  for (std::size_t i = 0; i < normal_matrix.size(); ++i) normal_matrix[i][i] += l;
  mat x = solve(normal_matrix, times(at, rest));
  for (std::size_t i = 0; i < x.size(); ++i)
    for (std::size_t j = 0; j < x[i].size(); ++j) x[i][j] += x0[i][j];
  return x;
}

}  // namespace oracle
