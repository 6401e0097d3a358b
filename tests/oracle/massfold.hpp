// SPDX-License-Identifier: MIT
// massfold (jg-codes 2026): the evicted slots of a scorer go into those that it keeps.
//
//   i(j) = argmax cos(k_j, k_i) over the kept slots i that are no sinks, for each evicted j
//   w_j  = exp(s_j - s_i(j)), s the logarithm of the score, of at least 1e-30
//   v_i <- (v_i + sum w_j v_j) / (1 + sum w_j), beta_i <- beta_i + ln(1 + sum w_j); keys as they
//   are
//
// Readings: a slot that its scorer protects has the largest score of those that compete, as kvpress
// gives it; so no exponent exceeds 0, where the code cuts at 30. Slots of a log-mass already (in
// decode, which the code leaves out) add to it: their scores are of all that they stand for. What
// the scorer remembers of the slots of a merge is added up.
#pragma once

#include <functional>

#include "oracle/match.hpp"

namespace oracle {

/// `inner`: fills in what its slots are scored by, in `prompt` and `step`.
template <class Inner>
struct massfold {
  Inner inner;
  int sinks = 4, recent = 0;  // that `inner` protects
  std::function<double(const slot&)> score;

  void fold(head& h, int target) const {
    if (static_cast<int>(h.slots.size()) <= target) return;
    const std::vector<bool> safe = protected_slots(h, sinks, recent);
    vec s;
    double most = 0;
    for (std::size_t j = 0; j < safe.size(); ++j) {
      s.push_back(score(h.slots[j]));
      if (!safe[j]) most = std::max(most, s[j]);
    }
    const std::vector<bool> keep = kept_slots(safe, s, target);
    const auto log_score = [&](std::size_t j) {
      return std::log(std::max(safe[j] ? most : s[j], 1e-30));
    };
    std::vector<std::size_t> takes;
    for (const std::size_t i : where(keep, true))
      if (h.slots[i].position >= sinks) takes.push_back(i);
    head after = h;
    vec sum(h.slots.size(), 0.0);
    for (const std::size_t j : where(keep, false)) {
      const std::size_t i = nearest(h.slots, takes, h.slots[j].key).slot;
      const double w = std::exp(log_score(j) - log_score(i));
      add(after.slots[i].value, w, h.slots[j].value);
      sum[i] += w;
      after.slots[i].score += h.slots[j].score;
      after.slots[i].past += h.slots[j].past;
      after.slots[i].current += h.slots[j].current;
    }
    for (const std::size_t i : takes) {
      for (double& x : after.slots[i].value) x /= 1 + sum[i];
      after.slots[i].log_mass += std::log1p(sum[i]);
    }
    keep_only(after, keep);
    h = after;
  }

  void prompt(head& h, const tensor& queries, const std::vector<int>& positions, int target) const {
    inner.prompt(h, queries, positions, static_cast<int>(h.slots.size()));
    fold(h, target);
  }
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    const mat output = inner.step(h, q, k, v, static_cast<int>(h.slots.size()) + 1);
    if (triggered(h, target, trigger)) fold(h, target);
    return output;
  }
};

}  // namespace oracle
