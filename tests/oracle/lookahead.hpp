// SPDX-License-Identifier: MIT
// Reference queries moved to the positions to come, and the leverage of keys. Used by fold, and at
// hand for policies that measure slots on queries.
#pragma once

#include "oracle/linear.hpp"
#include "oracle/policies.hpp"

namespace oracle {

/// Queries with the positions that they are rotated for.
struct placed_queries {
  tensor queries;              // [n][group][dim]
  std::vector<int> positions;  // [n]
};

/// At most `count` of them, spread evenly: the indices first + floor(i (N - 1 - first) / (n - 1)),
/// in integers, with first = 4 (queries of the sinks are unlike all others) or 0 when there are no
/// more than 4, and n = min(count, N - first).
inline placed_queries spread(const placed_queries& all, int count) {
  const int total = static_cast<int>(all.queries.size());
  const int first = total > 4 ? 4 : 0, n = std::min(count, total - first);
  placed_queries some;
  for (int i = 0; i < n; ++i) {
    const auto t = static_cast<std::size_t>(
        first + (n > 1 ? static_cast<long>(i) * (total - 1 - first) / (n - 1) : 0));
    some.queries.push_back(all.queries[t]);
    some.positions.push_back(all.positions[t]);
  }
  return some;
}

/// Where queries look. The time t at which a share u of them has been placed: of a density that
/// falls as 1/(t + fade) up to the horizon, ln((t + fade)/fade) = u ln((horizon + fade)/fade); even
/// when fade is infinite.
struct ahead {
  int horizon = 256;
  double fade = 16;

  int at(int i, int n) const {
    if (std::isinf(fade)) return static_cast<int>(static_cast<long>(i) * horizon / n);
    const double u = static_cast<double>(i) / n;
    return static_cast<int>(fade * std::expm1(u * std::log((horizon + fade) / fade)));
  }
};

/// The i-th of n queries, rotated on from its own position to that many behind `next`.
/// [n * group][dim], the query heads of one query side by side; their order does not matter.
inline mat foreseen(const placed_queries& some, int next, const ahead& where,
                    const rope& rotation) {
  mat rows;
  const int n = static_cast<int>(some.queries.size());
  for (int i = 0; i < n; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const int to = next + where.at(i, n);
    for (const vec& q : some.queries[at])
      rows.push_back(rotated(q, to - some.positions[at], rotation));
  }
  return rows;
}

/// The keys as they were before rotation, each turned back by its slot's position. [slots][dim]
inline mat unrotated_keys(const head& h, const rope& rotation) {
  mat x;
  for (const slot& s : h.slots) x.push_back(rotated(s.key, -s.position, rotation));
  return x;
}

/// (x - mean)^T (c + ridge * trace(c)/dim * I)^-1 (x - mean) for each row of x; 0 if c is 0.
inline vec leverage(const mat& x, const vec& mean, mat c, double ridge = 0.01) {
  double trace = 0;
  for (std::size_t i = 0; i < c.size(); ++i) trace += c[i][i];
  if (trace <= 0) return vec(x.size(), 0.0);
  for (std::size_t i = 0; i < c.size(); ++i)
    c[i][i] += ridge * trace / static_cast<double>(c.size());
  vec all;
  for (vec row : x) {
    for (std::size_t i = 0; i < row.size(); ++i) row[i] -= mean[i];
    all.push_back(dot(row, solve(c, row)));
  }
  return all;
}

/// Mean of the rows. [dim]
inline vec mean_of(const mat& x) {
  vec mean(x.empty() ? 0 : x[0].size(), 0.0);
  for (const vec& row : x)
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += row[i] / static_cast<double>(x.size());
  return mean;
}

/// sum over the rows of (x - mean)(x - mean)^T. [dim][dim]
inline mat scatter(const mat& x, const vec& mean) {
  mat c = zeros(mean.size(), mean.size());
  for (const vec& row : x)
    for (std::size_t i = 0; i < mean.size(); ++i)
      for (std::size_t j = 0; j < mean.size(); ++j)
        c[i][j] += (row[i] - mean[i]) * (row[j] - mean[j]);
  return c;
}

/// Leverage of each row among all of them: x_i^T (X^T X + l I)^-1 x_i, X centred.
inline vec leverage(const mat& x, double ridge = 0.01) {
  const vec mean = mean_of(x);
  return leverage(x, mean, scatter(x, mean), ridge);
}

}  // namespace oracle
