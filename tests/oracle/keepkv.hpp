// SPDX-License-Identifier: MIT
// KeepKV (arXiv 2504.09936): votes and merges that leave the present output as it was (ZIP), with
// decay 0 and one query head.
//
// Notation. Slot j has beta_j = ln p_j (p: votes, 1 for a fresh token) and an estimate
// S_j = ln s_j of what s_j = exp(cap(scale q.k_j)) will be, log-mass not included. For G query
// heads s_j is the mean over the heads: S_j = logsumexp_g(cap(scale q_g.k_j)) - ln G. A sink is no
// part.
//
// Which EMA (eq. 8), per slot, over the queries that see it, the newest first:
//     s_j = (1 - a) sum_{i=0}^{n-1} a^i s_j(i) / (1 - a^n),   a = `decay`
// that is, divided by the sum of the weights that were given: with W = 1 + a + ... + a^(n-1),
//     W' = a W + 1,    s' = (a W s + s_now) / W'.             [columns: log_score = ln s, seen = W]
// After a prompt it has run over the last `window` of the prompt's queries only (on top of what a
// slot had before the prompt); in decode over every query since. A slot that no query has seen has
// s = 1 (S = 0), W = 0. decay = 0: s is the present query's, and merging is exact for it.
//
// Which score ranks the eviction: ln w_j = beta_j + S_j, the estimated unnormalised attention of
// the slot with its votes (the paper does not define the selection). The lowest is removed, ties:
// the higher slot. In code mode: the sum over the window of s_j, votes left out. With R queries in
// the window (at most `window`, since the prompt's first that counts), the oldest first, query r
// counts 1 + (distance_weight - 1) r/(R - 1), the only one of R = 1 counts 1 (the authors' default:
// 1.2; their vectors have 1).
//
// Merge (eqs. 7, 25, 26), any number of members, c (the kept) among them:
//     ln w_j = beta_j + S_j     A = logsumexp_j ln w_j     P = logsumexp_j beta_j
//     omega_j = exp(ln w_j - A)      kbar = sum omega_j k_j     v = sum omega_j v_j
//     M = sum omega_j S_j            r = (A - P) / M
//     1/2 <= r <= 2:   k = r kbar,  beta = P,      S = A - P
//     else (NaN too):  k = kbar,    beta = A - M,  S = M
// beta + S = A either way: the slot weighs what its members weighed. After the second way p is no
// integer any more; exp(beta) is used for it everywhere. W stays the kept slot's; position too.
//
// Prompt, merge_first (default; "merging before applying the eviction strategy", table 3):
//   1. walk: first the protected slots in slot order, then the others by falling score. A slot of
//      the others whose nearest leader (cosine of the keys as they were; ties to the lower slot) is
//      at least `similarity` near joins it; every other slot becomes a leader.
//   2. of those joins take the (slots - target) most similar, ties to the lower slot; a slot that
//      then does not join stays one of its own. Merge.
//   3. if more than `target` slots are left: the protected and the top by score after merging stay.
//      (No two leaders are similar, so none of those evicted now has a slot to merge with.)
// Else, always in decode and in code mode: select, then each slot not selected merges into its
// nearest selected key, protected ones too, if at least `similarity` near, or is evicted.
//
// Code mode (authors' code): the estimate is the mean over the last `window` queries that saw the
// slot, plus epsilon; weights p_j s_j; k the convex mean (r = 1); beta = P; of each query in the
// window a merged slot keeps the vote-weighted mean of its members' s, for as far back as the kept
// slot goes.
#pragma once

#include "oracle/match.hpp"

namespace oracle {

/// ln sum exp
inline double log_sum(const vec& x) {
  const double top = *std::max_element(x.begin(), x.end());
  if (!std::isfinite(top)) return top;
  double sum = 0;
  for (const double e : x) sum += std::exp(e - top);
  return top + std::log(sum);
}

struct keepkv {
  enum class mode { paper, code };
  int sinks = 4;
  double recent = 0.5;      // share of the budget
  double similarity = 0.8;  // merge at or above it
  mode variant = mode::paper;
  int window = 32;             // queries of a prompt that count; code: also in decode
  double decay = 0.9;          // of the EMA, a in eq. 8; a value of ours
  bool merge_first = true;     // of a prompt, paper mode
  double epsilon = 1e-6;       // code: added to the mean of exp(logit)
  double distance_weight = 1;  // code: of the window's latest query

  /// One query of each head, seen by the slots at positions up to `at`.
  void observe(head& h, const mat& q, int at) const {
    h.queries_seen = std::min(h.queries_seen + 1, window);
    for (slot& s : h.slots) {
      if (s.position > at) continue;
      vec logits;
      for (const vec& row : q) logits.push_back(h.terms.alike(row, s.key));
      const double now = log_sum(logits) - std::log(static_cast<double>(q.size()));
      const double old = decay * s.seen;
      s.log_score = old > 0 ? log_sum({std::log(old) + s.log_score, now}) - std::log(old + 1) : now;
      s.seen = old + 1;
      s.history.push_back(now);
      if (static_cast<int>(s.history.size()) > window) s.history.erase(s.history.begin());
    }
  }

  /// S_j
  double estimate(const slot& s) const {
    if (variant == mode::paper) return s.log_score;
    const double floor = std::log(epsilon);
    if (s.history.empty()) return floor;
    const double rows = static_cast<double>(s.history.size());
    return log_sum({log_sum(s.history) - std::log(rows), floor});
  }

  vec ranks(const head& h) const {
    vec rank;
    for (const slot& s : h.slots) {
      if (variant == mode::paper) {
        rank.push_back(s.log_mass + s.log_score);
        continue;
      }
      vec rows{-std::numeric_limits<double>::infinity()};
      for (std::size_t back = 1; back <= s.history.size(); ++back) {  // the latest is 1 back
        const double r = h.queries_seen - static_cast<double>(back), last = h.queries_seen - 1;
        const double weight = last > 0 ? 1 + (distance_weight - 1) * r / last : 1;
        rows.push_back(s.history[s.history.size() - back] + std::log(weight));
      }
      rank.push_back(log_sum(rows));
    }
    return rank;
  }

  /// `members[0]` is the kept slot.
  slot merged(const std::vector<slot>& members) const {
    slot made = members.at(0);
    if (members.size() == 1) return made;
    vec log_w, log_p;
    for (const slot& s : members) {
      log_w.push_back(s.log_mass + estimate(s));
      log_p.push_back(s.log_mass);
    }
    const double a = log_sum(log_w), p = log_sum(log_p);
    double mean = 0;  // M
    made.key = vec(made.key.size(), 0.0), made.value = vec(made.value.size(), 0.0);
    for (std::size_t j = 0; j < members.size(); ++j) {
      const double omega = std::exp(log_w[j] - a);
      mean += omega * estimate(members[j]);
      add(made.key, omega, members[j].key), add(made.value, omega, members[j].value);
    }
    made.log_mass = p;
    const double r = (a - p) / mean;
    for (const double end : {0.5, 2.0})  // a mean near 0 makes r's errors large: ten times as clear
      if (variant == mode::paper) decided(a - p, end * mean, 10);
    if (variant == mode::code) {
      for (std::size_t back = 1; back <= made.history.size(); ++back) {
        vec row{-std::numeric_limits<double>::infinity()};
        for (const slot& s : members)
          if (back <= s.history.size())
            row.push_back(s.log_mass + s.history[s.history.size() - back]);
        made.history[made.history.size() - back] = log_sum(row) - p;
      }
    } else if (r >= 0.5 && r <= 2) {
      for (double& x : made.key) x *= r;
      made.log_score = a - p;
    } else {
      made.log_mass = a - mean;
      made.log_score = mean;
    }
    return made;
  }

  /// Slot j goes into slot into[j]; j itself: it is kept; nowhere: it is evicted.
  static constexpr std::size_t nowhere = static_cast<std::size_t>(-1);
  void apply(head& h, const std::vector<std::size_t>& into) const {
    std::vector<slot> next;
    for (std::size_t c = 0; c < into.size(); ++c) {
      if (into[c] != c) continue;
      std::vector<slot> members{h.slots[c]};
      for (std::size_t j = 0; j < into.size(); ++j)
        if (j != c && into[j] == c) members.push_back(h.slots[j]);
      next.push_back(merged(members));
    }
    h.slots = next;
  }

  std::vector<bool> selected(const head& h, int target) const {
    return kept_slots(protected_slots(h, sinks, share(recent, target)), ranks(h), target, 1);
  }

  void select_and_merge(head& h, int target) const {
    const std::vector<bool> keep = selected(h, target);
    std::vector<std::size_t> into;
    for (std::size_t j = 0; j < keep.size(); ++j) {
      const nearest_key c = nearest(h.slots, where(keep, true), h.slots[j].key, similarity);
      into.push_back(keep[j] ? j : c.cosine >= similarity ? c.slot : nowhere);
    }
    apply(h, into);
  }

  void merge_and_select(head& h, int target) const {
    const std::vector<bool> held = protected_slots(h, sinks, share(recent, target));
    std::vector<std::size_t> into(held.size()), leaders = where(held, true), joining;
    for (std::size_t j = 0; j < into.size(); ++j) into[j] = j;
    vec cosines(held.size(), 0.0);
    const vec rank = ranks(h);
    for (const std::size_t j : top(rank, where(held, false), held.size())) {
      if (!leaders.empty()) {
        const nearest_key c = nearest(h.slots, leaders, h.slots[j].key, similarity);
        if (c.cosine >= similarity) {
          into[j] = c.slot;
          cosines[j] = c.cosine;
          joining.push_back(j);
          continue;
        }
      }
      leaders.push_back(j);
    }
    for (const std::size_t leader : leaders)  // what is near one comes after it
      for (std::size_t j = 0; j < into.size() && !held[leader]; ++j)
        if (!held[j] && cosine(h.slots[j].key, h.slots[leader].key) >= similarity)
          decided(rank[leader], rank[j], 1);
    const std::size_t excess = h.slots.size() - static_cast<std::size_t>(target);
    const std::vector<std::size_t> taken = top(cosines, joining, excess, 1);
    for (const std::size_t j : joining)
      if (std::find(taken.begin(), taken.end(), j) == taken.end()) into[j] = j;
    apply(h, into);
    if (static_cast<int>(h.slots.size()) > target) keep_only(h, selected(h, target));
  }

  void prompt(head& h, const tensor& queries, const std::vector<int>& positions, int target) const {
    const std::vector<int> at = positions_or_last(h, queries.size(), positions);
    h.queries_seen = 0;
    for (slot& s : h.slots) {  // "after a prompt, computed over the last W queries": of it alone
      s.seen = 0;
      s.history.clear();
    }
    for (std::size_t i = 0; i < queries.size(); ++i)
      if (static_cast<int>(queries.size() - i) <= window) observe(h, queries[i], at[i]);
    if (static_cast<int>(h.slots.size()) <= target) return;
    if (variant == mode::paper && merge_first)
      merge_and_select(h, target);
    else
      select_and_merge(h, target);
  }
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    append(h, k, v);
    const mat output = attend(h, q).output;  // eq. 6: the votes are the log-mass
    observe(h, q, newest(h));
    if (triggered(h, target, trigger)) select_and_merge(h, target);
    return output;
  }
};

}  // namespace oracle
