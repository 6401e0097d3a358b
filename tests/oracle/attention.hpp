// SPDX-License-Identifier: MIT
// The oracle: what the library must compute, in double precision and plain loops, transcribed from
// the papers and sharing no code with the library. Slow on purpose.
//
// This file: one KV head, attention over its slots, and the column sums of a prompt's attention.
#pragma once

#include <algorithm>
#include <utility>

#include "oracle/terms.hpp"

namespace oracle {

/// ems: a token that shares a slot's entry with others, with its own norm and scores.
struct ems_member {
  int position;
  double norm;            // length of the token's own key
  double glo, past, cur;  // attention it received: of all queries, the last window, this window
};

/// fold, while decoding: the latest queries, and running sums over all un-rotated keys.
struct fold_memory {
  std::vector<std::pair<int, mat>> queries = {};  // position, [group][dim]
  mat own = {};      // [queries][group] log-sum-exp of each one's step; infinite: it scored before
  int unscored = 0;  // steps since slots were scored
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
  oracle::terms terms;      // see make_head
  std::vector<slot> slots;  // as appended
  int next = 0;             // position of the next token
  int queries_seen = 0;     // snapkv: in the current window
  double threshold = 0;     // d2o: tau of eq. 10, once has_threshold is set
  bool has_threshold = false;
  fold_memory memory = {};    // fold
  query_memory moments = {};  // expected_attention
  int value_dim = 0;          // 0: dim
  int prompt = 0;             // random: tokens that had come when the latest prompt ended

  std::size_t values() const { return static_cast<std::size_t>(value_dim > 0 ? value_dim : dim); }
};

inline head make_head(int dim, int group, const terms& of_layer) {
  return {dim, group, of_layer, {}};
}
inline head make_head(int dim, int group = 1, double scale = 0) {
  return make_head(dim, group,
                   {.scale = scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(dim))});
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
  s.position = position >= 0 ? position : h.next;
  h.next = std::max(h.next, s.position + 1);
  h.slots.push_back(s);
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

/// l_j = cap(scale q.k_j) + slope (position_j - at) + beta_j, beta the log-mass (ZSMerge eq. 8 with
/// beta = alpha log w; KeepKV with beta = log p).
inline vec logits_of(const head& h, const vec& q, std::size_t row, int at = terms::nowhere) {
  vec l;
  for (const slot& s : h.slots)
    l.push_back(h.terms.alike(q, s.key) + h.terms.bias(row, s.position, at) + s.log_mass);
  return l;
}

/// One row's attention: of head `row` mod group, at position `at`, over the slots `visible`. `lse`:
/// the log-sum-exp of its logits.
inline vec probabilities(const head& h, const vec& q, std::size_t row, int at,
                         const std::vector<bool>& visible, double& lse) {
  return softmax(logits_of(h, q, row, at), visible, lse, h.terms.sink(row));
}

/// The slots that a query at `at` sees. [slots]
inline std::vector<bool> seen_from(const head& h, int at) {
  std::vector<bool> sees;
  for (const slot& s : h.slots) sees.push_back(h.terms.sees(at, s.position));
  return sees;
}

/// o = sum_j a_j v_j for each row of `q`, which belong to the group's heads in turn. Of decode: at
/// the newest position held, unless one is given.
inline attention attend(const head& h, const mat& q, int at = terms::nowhere) {
  attention r;
  if (at == terms::nowhere) at = newest(h);
  for (std::size_t row = 0; row < q.size(); ++row) {
    double lse = 0;
    const vec a = probabilities(h, q[row], row, at, seen_from(h, at), lse);
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
    const mat p = attend(h, queries[i], at[i]).probabilities;
    for (const vec& row : p)
      for (std::size_t j = 0; j < slots; ++j) s.largest[j] = std::max(s.largest[j], row[j]);
    const vec a = combined(p, options.group);
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
