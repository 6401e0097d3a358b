// SPDX-License-Identifier: MIT
// The oracle: what the library must compute, in double precision and plain loops, transcribed from
// the papers and sharing no code with the library. Slow on purpose.
//
// This file: one KV head, attention with log-mass, and the column sums of a prompt's attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

namespace oracle {

using vec = std::vector<double>;
using mat = std::vector<vec>;     // [rows][columns]
using tensor = std::vector<mat>;  // queries: [n][group][dim]

/// ems: a token that shares a slot's entry with others, with its own norm and scores.
struct ems_member {
  int position;
  double norm;            // length of the token's own key
  double glo, past, cur;  // attention it received: of all queries, the last window, this window
};

/// fold, while decoding: the latest queries, and running sums over all un-rotated keys.
struct fold_memory {
  std::vector<std::pair<int, mat>> queries = {};  // position, [group][dim]
};

/// expected_attention: running sums over all un-rotated queries, for each query head.
struct query_memory {
  int count = 0;
  mat sum = {};         // [group][dim]
  tensor squares = {};  // [group][dim][dim]
};

struct slot {
  vec key, value;         // [dim], [value_dim]
  double log_mass = 0;    // beta of the slot: 0 for an untouched token
  int position = 0;       // of the token; of the first member for merged tokens
  double score = 0;       // h2o: cumulative attention; zsmerge: decayed attention (eq. 5)
  double past = 0;        // snapkv: the window before this one
  double current = 0;     // snapkv: this window so far
  double count = 1;       // zsmerge: fusion count w (eq. 7)
  bool residual = false;  // zsmerge: the slot is one of the residual ones
  double log_score = 0;   // keepkv: ln of the estimate of exp(scale q.k) (eq. 8); 0 if never seen
  double seen = 0;        // keepkv: sum of the estimate's weights, 1 + decay + decay^2 ...
  vec history;            // keepkv's code: ln exp(scale q.k) for the last queries that saw the slot
  // fold, ems and the baselines:
  bool single = true;                    // fold: the slot has never held more than one token
  std::vector<ems_member> members = {};  // ems: empty for an untouched token
  double squares = 0;                    // roco: sum of squares of the attention received
  double observed = 0;                   // roco: queries that have seen the slot
};

struct head {
  int dim = 0, group = 1;
  double scale = 0;         // of the logits; see make_head
  std::vector<slot> slots;  // as appended
  int queries_seen = 0;     // snapkv: in the current window
  double threshold = 0;     // d2o: tau of eq. 10, once has_threshold is set
  bool has_threshold = false;
  fold_memory memory = {};    // fold
  query_memory moments = {};  // expected_attention
  int value_dim = 0;          // 0: dim

  std::size_t values() const { return static_cast<std::size_t>(value_dim > 0 ? value_dim : dim); }
};

inline head make_head(int dim, int group = 1, double scale = 0) {
  return {dim, group, scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(dim)), {}, 0};
}

/// The largest position held, -1 for an empty head.
inline int newest(const head& h) {
  int last = -1;
  for (const slot& s : h.slots) last = std::max(last, s.position);
  return last;
}

/// Adds a fresh token; its position is the next one unless it is given.
inline void append(head& h, const vec& key, const vec& value, int position = -1) {
  slot s;
  s.key = key;
  s.value = value;
  s.position = position >= 0 ? position : newest(h) + 1;
  h.slots.push_back(s);
}

inline double dot(const vec& a, const vec& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// to += w from
inline void add(vec& to, double w, const vec& from) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] += w * from[i];
}

struct attention {
  mat output;         // [group][value_dim]
  mat probabilities;  // [group][slots]
  vec lse;            // [group], log-sum-exp of the logits
};

/// Softmax of `logits` over the slots that are `visible`; a query that sees nothing gives zeros.
inline vec softmax(const vec& logits, const std::vector<bool>& visible, double& lse) {
  double top = -std::numeric_limits<double>::infinity();
  for (std::size_t j = 0; j < logits.size(); ++j)
    if (visible[j]) top = std::max(top, logits[j]);
  vec a(logits.size(), 0.0);
  lse = top;
  if (!std::isfinite(top)) return a;
  double sum = 0;
  for (std::size_t j = 0; j < logits.size(); ++j)
    if (visible[j]) sum += a[j] = std::exp(logits[j] - top);
  for (double& x : a) x /= sum;
  lse = top + std::log(sum);
  return a;
}

/// l_j = scale q.k_j + beta_j  (ZSMerge eq. 8 with beta = alpha log w; KeepKV with beta = log p).
inline vec logits_of(const head& h, const vec& q) {
  vec l;
  for (const slot& s : h.slots) l.push_back(h.scale * dot(q, s.key) + s.log_mass);
  return l;
}

/// a = softmax(l), o = sum_j a_j v_j for each query head (ZSMerge eqs. 2 and 8).
inline attention attend(const head& h, const mat& q) {
  attention r;
  const std::vector<bool> all(h.slots.size(), true);
  for (const vec& row : q) {
    double lse = 0;
    const vec a = softmax(logits_of(h, row), all, lse);
    vec o(h.values(), 0.0);
    for (std::size_t j = 0; j < a.size(); ++j)
      for (std::size_t i = 0; i < o.size(); ++i) o[i] += a[j] * h.slots[j].value[i];
    r.output.push_back(o);
    r.probabilities.push_back(a);
    r.lse.push_back(lse);
  }
  return r;
}

/// How the probabilities of the query heads that share a KV head become one number.
enum class combine { sum, mean, max };

/// [group][slots] -> [slots]
inline vec combined(const mat& probabilities, combine how) {
  vec a(probabilities.empty() ? 0 : probabilities[0].size(), 0.0);
  for (const vec& p : probabilities)
    for (std::size_t j = 0; j < a.size(); ++j)
      a[j] = how == combine::max ? std::max(a[j], p[j]) : a[j] + p[j];
  if (how == combine::mean)
    for (double& x : a) x /= static_cast<double>(probabilities.size());
  return a;
}

struct column_sums {
  vec total;    // sum_i A_ij
  vec last;     // sum_{i >= n - window} A_ij
  vec decayed;  // sum_i decay^(n-1-i) A_ij   (ZSMerge eq. 5 unrolled)
  vec largest;  // max_i A_ij, of every query head by itself
};

struct column_options {
  int window = 32;
  double decay = 1;
  combine group = combine::sum;
  bool causal = true;  // slot j is visible to query i iff position_j <= position_i
};

/// The positions of `n` queries of which none were given: the last `n`.
inline std::vector<int> positions_or_last(const head& h, std::size_t n,
                                          const std::vector<int>& given) {
  if (!given.empty() || n == 0) return given;
  std::vector<int> p;
  for (std::size_t i = 0; i < n; ++i)
    p.push_back(newest(h) - static_cast<int>(n) + 1 + static_cast<int>(i));
  return p;
}

/// Column sums of the attention of `queries` [n][group][dim] at `positions` [n] (empty: the last
/// n).
inline column_sums column_scores(const head& h, const tensor& queries,
                                 const std::vector<int>& positions, column_options options) {
  const std::size_t n = queries.size(), slots = h.slots.size();
  const std::vector<int> at = positions_or_last(h, n, positions);
  column_sums s{vec(slots, 0.0), vec(slots, 0.0), vec(slots, 0.0), vec(slots, 0.0)};
  for (std::size_t i = 0; i < n; ++i) {
    std::vector<bool> visible;
    for (const slot& x : h.slots) visible.push_back(!options.causal || x.position <= at[i]);
    mat probabilities;
    for (const vec& q : queries[i]) {
      double lse = 0;
      probabilities.push_back(softmax(logits_of(h, q), visible, lse));
    }
    for (const vec& p : probabilities)
      for (std::size_t j = 0; j < slots; ++j) s.largest[j] = std::max(s.largest[j], p[j]);
    const vec a = combined(probabilities, options.group);
    const bool in_window = static_cast<int>(n - i) <= options.window;
    for (std::size_t j = 0; j < slots; ++j) {
      s.total[j] += a[j];
      if (in_window) s.last[j] += a[j];
      s.decayed[j] += std::pow(options.decay, static_cast<double>(n - 1 - i)) * a[j];
    }
  }
  return s;
}

}  // namespace oracle
