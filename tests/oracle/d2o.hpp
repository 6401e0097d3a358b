// SPDX-License-Identifier: MIT
// D2O (arXiv 2406.13035): evict by cumulative attention, merge the evicted into the nearest kept
// key when it is near enough, by a threshold that follows the similarities seen.
//
// Readings. The paper is followed per token and per head; the authors' code shares threshold and
// filter between heads and weighs by the raw similarity. The kept keys a token is matched with are
// all kept ones, protected ones too, as they were before this compression; the self-similarity of
// the kept token in eq. 12 is 1. Log-mass and score of a kept slot do not change when it absorbs
// others, unless `counts`.
//
// counts (ours): slot j stands for n_j = exp(log-mass) tokens. Each of them has its slot's weight
// in eqs. 11-12, and the slot made of j and E_j stands for n_j + sum n_i. code_weights (the
// authors' code): k_j <- (n_j k_j + sum n_i u_ij k_i) / (n_j + sum n_i), values alike, with all n 1
// unless `counts`: the raw similarity, divided by the number.
#pragma once

#include "oracle/match.hpp"

namespace oracle {

struct d2o {
  int sinks = 4;
  double recent = 0.25;  // share of target - sinks; N:M = 3:1 (N heavy hitters, M recent)
  double beta = 0.7;     // of eq. 10
  bool counts = false, code_weights = false;
  combine group = combine::sum;

  /// Sinks, M recent, and the top N of the rest by cumulative attention (eqs. 7-8).
  std::vector<bool> selected(const head& h, int target) const {
    const int m = share(recent, target - sinks);
    return kept_slots(protected_slots(h, sinks, m), scores_of(h), target);
  }

  /// Eq. 10. m: mean over the evicted of their largest similarity, those that will be dropped
  /// counted too. The first compression of a head, of a prompt or in decode, sets tau to m.
  void update_threshold(head& h, double m) const {
    h.threshold = h.has_threshold ? beta * m + (1 - beta) * h.threshold : m;
    h.has_threshold = true;
  }

  void compress(head& h, int target) const {
    if (static_cast<int>(h.slots.size()) <= target) return;
    const std::vector<bool> keep = selected(h, target);
    const std::vector<std::size_t> kept = where(keep, true), evicted = where(keep, false);
    const std::vector<slot> before = h.slots;
    std::vector<nearest_key> match;  // eq. 9, [evicted]
    double m = 0;
    for (const std::size_t i : evicted) {
      match.push_back(nearest(before, kept, before[i].key));
      m += match.back().cosine / static_cast<double>(evicted.size());
    }
    update_threshold(h, m);
    for (const std::size_t j : kept) {
      // Eqs. 11-12: weights e for the kept, exp(u_ij) for the assigned, divided by their sum Z.
      std::vector<std::pair<const slot*, double>> members = {{&before[j], 1.0}};
      for (std::size_t i = 0; i < evicted.size(); ++i)
        if (match[i].slot == j && !(match[i].cosine < h.threshold))
          members.emplace_back(&before[evicted[i]], match[i].cosine);
      if (members.size() == 1) continue;  // none came
      double z = 0, all = 0;
      slot& s = h.slots[j];
      s.key = vec(s.key.size(), 0.0), s.value = vec(s.value.size(), 0.0);
      for (const auto& [member, u] : members) {
        const double n = counts ? std::exp(member->log_mass) : 1;
        const double w = n * (code_weights ? u : std::exp(u));
        add(s.key, w, member->key), add(s.value, w, member->value);
        z += w, all += n;
      }
      for (vec* x : {&s.key, &s.value})
        for (double& e : *x) e /= code_weights ? all : z;
      if (counts) s.log_mass = std::log(all);
    }
    keep_only(h, keep);
  }

  void prompt(head& h, const tensor& queries, const std::vector<int>& positions, int target) const {
    add_column_sums(h, queries, positions, group);  // eq. 6
    compress(h, target);
  }
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    const mat output = append_and_observe(h, q, k, v, group);
    if (triggered(h, target, trigger)) compress(h, target);
    return output;
  }
};

}  // namespace oracle
