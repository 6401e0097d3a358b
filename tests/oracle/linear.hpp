// Small dense linear algebra, by the book: elimination, Cholesky, Jacobi's eigenvalues.
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
    if (a[pivot][c] == 0) throw std::invalid_argument("oracle: the matrix is singular");
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
      if (i == j && sum <= 0) throw std::invalid_argument("oracle: not positive definite");
      l[i][j] = i == j ? std::sqrt(sum) : sum / l[j][j];
    }
  return l;
}

/// The largest eigenvalue of a symmetric matrix, by Jacobi's rotations.
inline double largest_eigenvalue(mat a) {
  const std::size_t n = a.size();
  double all = 0;
  for (const vec& row : a) all += dot(row, row);
  for (int sweep = 0; sweep < 60; ++sweep) {
    double off = 0;
    for (std::size_t p = 0; p < n; ++p)
      for (std::size_t q = p + 1; q < n; ++q) off += a[p][q] * a[p][q];
    if (off <= 1e-28 * all) break;
    for (std::size_t p = 0; p < n; ++p)
      for (std::size_t q = p + 1; q < n; ++q) {
        if (a[p][q] == 0) continue;
        const double theta = (a[q][q] - a[p][p]) / (2 * a[p][q]);
        const double t = (theta >= 0 ? 1 : -1) / (std::abs(theta) + std::sqrt(theta * theta + 1));
        const double c = 1 / std::sqrt(t * t + 1), s = t * c;
        for (std::size_t i = 0; i < n; ++i) {
          const double ip = a[i][p], iq = a[i][q];
          a[i][p] = c * ip - s * iq;
          a[i][q] = s * ip + c * iq;
        }
        for (std::size_t i = 0; i < n; ++i) {
          const double pi = a[p][i], qi = a[q][i];
          a[p][i] = c * pi - s * qi;
          a[q][i] = s * pi + c * qi;
        }
      }
  }
  double most = n == 0 ? 0 : a[0][0];
  for (std::size_t i = 0; i < n; ++i) most = std::max(most, a[i][i]);
  return most;
}

/// Ridge least squares: the x nearest `x0` in the sense of
///   min |a x - b|^2 + l |x - x0|^2,  l = `ridge` times the largest eigenvalue of a^T a.
/// a [rows][n], b [rows][columns], x0 [n][columns].
inline mat ridge_around(const mat& a, const mat& b, const mat& x0, double ridge) {
  const mat at = transposed(a), guess = times(a, x0);
  mat rest = b;
  for (std::size_t i = 0; i < b.size(); ++i)
    for (std::size_t j = 0; j < b[i].size(); ++j) rest[i][j] -= guess[i][j];
  mat normal_matrix = times(at, a);
  const double l = ridge * largest_eigenvalue(normal_matrix);
  for (std::size_t i = 0; i < normal_matrix.size(); ++i) normal_matrix[i][i] += l;
  mat x = solve(normal_matrix, times(at, rest));
  for (std::size_t i = 0; i < x.size(); ++i)
    for (std::size_t j = 0; j < x[i].size(); ++j) x[i][j] += x0[i][j];
  return x;
}

}  // namespace oracle
