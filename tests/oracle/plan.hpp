// SPDX-License-Identifier: MIT
// Merge plans as dense matrices: K' = Wk K, V' = Wv V (+ correction), beta' = the plan's own.
#pragma once

#include "oracle/attention.hpp"

namespace oracle {

struct merge_source {
  int source;
  double wk, wv;
};
struct plan_row {
  std::vector<merge_source> sources;
  double log_mass = 0;  // of the slot the row makes; replaces what its sources had
};

struct dense_plan {
  mat wk, wv;      // [rows][length]
  vec log_mass;    // [rows]
  mat correction;  // [rows][dim] added to the values, or empty
};

inline dense_plan dense(const std::vector<plan_row>& rows, int length, const mat& correction = {}) {
  dense_plan p;
  for (const plan_row& row : rows) {
    vec wk(static_cast<std::size_t>(length), 0.0), wv = wk;
    for (const merge_source& e : row.sources) {
      wk.at(static_cast<std::size_t>(e.source)) += e.wk;
      wv.at(static_cast<std::size_t>(e.source)) += e.wv;
    }
    p.wk.push_back(wk);
    p.wv.push_back(wv);
    p.log_mass.push_back(row.log_mass);
  }
  p.correction = correction;
  return p;
}

inline mat product(const mat& a, const mat& b, std::size_t columns) {
  mat c(a.size(), vec(columns, 0.0));
  for (std::size_t i = 0; i < a.size(); ++i)
    for (std::size_t t = 0; t < b.size(); ++t)
      for (std::size_t j = 0; j < columns; ++j) c[i][j] += a[i][t] * b[t][j];
  return c;
}

/// The plan that does `first` and then `second`, whose sources are the rows of `first`.
inline dense_plan compose(const dense_plan& second, const dense_plan& first) {
  const std::size_t length = first.wk.empty() ? 0 : first.wk[0].size();
  dense_plan p{product(second.wk, first.wk, length), product(second.wv, first.wv, length),
               second.log_mass, second.correction};
  if (!first.correction.empty()) {
    const mat carried = product(second.wv, first.correction, first.correction[0].size());
    if (p.correction.empty()) p.correction = mat(carried.size(), vec(carried[0].size(), 0.0));
    for (std::size_t r = 0; r < carried.size(); ++r)
      for (std::size_t i = 0; i < carried[r].size(); ++i) p.correction[r][i] += carried[r][i];
  }
  return p;
}

/// Keys, values and log-mass after a plan; everything else of a slot comes from its source of least
/// index. The policies' own state is theirs to fold and is not touched here.
inline head apply_plan(const head& h, const dense_plan& p) {
  head out = h;
  out.slots.clear();
  for (std::size_t r = 0; r < p.wk.size(); ++r) {
    slot made;
    bool found = false;
    for (std::size_t j = 0; j < h.slots.size() && !found; ++j)
      if (p.wk[r][j] != 0 || p.wv[r][j] != 0) {
        made = h.slots[j];
        found = true;
      }
    made.key = vec(static_cast<std::size_t>(h.dim), 0.0), made.value = vec(h.values(), 0.0);
    for (std::size_t j = 0; j < h.slots.size(); ++j) {
      for (std::size_t i = 0; i < made.key.size(); ++i)
        made.key[i] += p.wk[r][j] * h.slots[j].key[i];
      for (std::size_t i = 0; i < made.value.size(); ++i)
        made.value[i] += p.wv[r][j] * h.slots[j].value[i];
    }
    if (!p.correction.empty())
      for (std::size_t i = 0; i < made.value.size(); ++i) made.value[i] += p.correction[r][i];
    made.log_mass = p.log_mass[r];
    out.slots.push_back(made);
  }
  return out;
}

inline head apply_plan(const head& h, const std::vector<plan_row>& rows,
                       const mat& correction = {}) {
  return apply_plan(h, dense(rows, static_cast<int>(h.slots.size()), correction));
}

}  // namespace oracle
