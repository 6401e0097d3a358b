// SPDX-License-Identifier: MIT
// ZSMerge (arXiv 2503.10714): ring of the latest, context by score, residual slots for the others.
#pragma once

#include "oracle/policies.hpp"

namespace oracle {

struct zsmerge {
  double proximity = 0.1;  // share of the budget for the ring
  int residual = 1;
  double alpha = 0.6;
  double decay = 0.98;
  bool new_token_competes = true;  // Algorithm 1; false: the authors' code
  bool score_sum = false;          // score of a merged slot: max (the authors' default) or sum
  bool nearest = false;            // prompt: eq. 6 against seeds, else the authors' chunks
  combine group = combine::sum;
  bool wait = false;  // Algorithm 1 sorts tokens before the cache is full; true: only when it is

  struct regions {
    int ring, context, residual;
  };
  /// B = Bp + Bc + Br (eq. 3)
  regions split(int target) const {
    const int ring = std::max(2, share(proximity, target));
    const int context = target - ring - residual;
    if (context < 1) throw std::invalid_argument("oracle: zsmerge: expected a slot for context");
    return {ring, context, residual};
  }

  /// Eq. 7 with any count for the token that is merged: r <- (w_r r + w_c c) / (w_r + w_c).
  void fuse(slot& r, const slot& c) const {
    const double w = r.count + c.count;
    const auto mean = [&](vec& x, const vec& y) {
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = (r.count * x[i] + c.count * y[i]) / w;
    };
    mean(r.key, c.key), mean(r.value, c.value);
    r.score = score_sum ? r.score + c.score : std::max(r.score, c.score);
    r.count = w;
    r.log_mass = alpha * std::log(w);  // eq. 8
  }
  /// Eq. 6: the slot among `among` with the largest k_r . k_t, ties to the lower slot.
  static std::size_t match(const std::vector<slot>& slots, const std::vector<std::size_t>& among,
                           const vec& key) {
    std::size_t best = among.at(0);
    for (std::size_t r : among)
      if (dot(slots[r].key, key) > dot(slots[best].key, key)) best = r;
    return best;
  }

  /// Ring and context stay; the rest, in position order, becomes at most Br residual slots.
  void compress_prompt(head& h, int target) const {
    const regions b = split(target);
    const int n = static_cast<int>(h.slots.size());
    if (n <= (wait ? target : b.ring + b.context)) return;
    std::vector<bool> keep(h.slots.size());
    std::vector<std::size_t> old, rest;
    vec score;
    for (std::size_t j = 0; j < h.slots.size(); ++j) {
      score.push_back(h.slots[j].score);
      keep[j] = h.slots[j].position > newest(h) - b.ring;
      if (!keep[j]) old.push_back(j);
    }
    for (std::size_t j : top(score, old, static_cast<std::size_t>(b.context))) keep[j] = true;
    for (std::size_t j : old)
      if (!keep[j]) rest.push_back(j);
    std::sort(rest.begin(), rest.end(), [&](std::size_t a, std::size_t c) {
      return h.slots[a].position < h.slots[c].position;
    });
    const auto slots_for_rest = static_cast<std::size_t>(b.residual);
    if (nearest) {
      std::vector<std::size_t> seeds = top(score, rest, slots_for_rest);
      std::sort(seeds.begin(), seeds.end());
      const std::vector<slot> before = h.slots;  // the seeds' keys as they were, for eq. 6
      for (std::size_t s : seeds) keep[s] = h.slots[s].residual = true;
      for (std::size_t j : rest)
        if (!keep[j] && !seeds.empty())
          fuse(h.slots[match(before, seeds, before[j].key)], before[j]);
    } else {
      std::size_t next = 0;
      for (std::size_t c = 0; c < slots_for_rest && next < rest.size(); ++c) {
        const std::size_t first = rest[next];
        const std::size_t size =
            rest.size() / slots_for_rest + (c < rest.size() % slots_for_rest ? 1 : 0);
        keep[first] = h.slots[first].residual = true;
        for (std::size_t i = 1; i < size; ++i) fuse(h.slots[first], h.slots[rest[next + i]]);
        next += size;
      }
    }
    keep_only(h, keep);
  }

  void prompt(head& h, const tensor& queries, const std::vector<int>& positions, int target) const {
    // Eq. 5 unrolled over the prompt: s_j = sum_i lambda^(n-1-i) A_ij.
    const column_options options{.decay = decay, .group = group};
    const vec sums = column_scores(h, queries, positions, options).decayed;
    const double aged = std::pow(decay, static_cast<double>(queries.size()));
    for (std::size_t j = 0; j < sums.size(); ++j)
      h.slots[j].score = aged * h.slots[j].score + sums[j];
    compress_prompt(h, target);
  }

  /// Algorithm 1, lines 10-17, once: the slot to remove from the context, if it is over its size.
  /// `before`: the head whose residual keys are matched against; several removed at once do not see
  /// each other.
  bool shrink_context(head& h, int target, const head& before) const {
    const regions b = split(target);
    const int last = newest(h);
    std::vector<std::size_t> context, candidates, residuals;
    for (std::size_t j = 0; j < h.slots.size(); ++j) {
      const slot& s = h.slots[j];
      if (s.residual) {
        residuals.push_back(j);
      } else if (s.position <= last - b.ring) {
        context.push_back(j);
        if (new_token_competes || s.position != last - b.ring) candidates.push_back(j);
      }
    }
    if (static_cast<int>(context.size()) <= b.context || candidates.empty()) return false;
    std::size_t c = candidates[0];  // argmin_c s_c, NaN counts as the lowest
    for (std::size_t j : candidates) {
      const double a = h.slots[j].score, lowest = h.slots[c].score;
      // Keeping goes to the lower slot among equals, so the higher one is removed.
      if (std::isnan(a) || (!std::isnan(lowest) && a <= lowest)) c = j;
    }
    if (static_cast<int>(residuals.size()) < b.residual) {
      h.slots[c].residual = true;
      return true;
    }
    if (!residuals.empty()) {
      std::vector<slot> as_they_were = h.slots;
      for (slot& s : as_they_were)
        for (const slot& old : before.slots)
          if (old.position == s.position) s.key = old.key;
      fuse(h.slots[match(as_they_were, residuals, h.slots[c].key)], h.slots[c]);
    }
    h.slots.erase(h.slots.begin() + static_cast<std::ptrdiff_t>(c));
    return true;
  }

  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    append(h, k, v);
    const attention r = attend(h, q);
    const vec a = combined(r.probabilities, group);
    for (std::size_t j = 0; j < a.size(); ++j)
      h.slots[j].score = decay * h.slots[j].score + a[j];  // eq. 5
    const bool fits = static_cast<int>(h.slots.size()) <= target;
    const head before = h;
    if (triggered(h, target, trigger) || (fits && !wait))
      while (shrink_context(h, target, before)) {
      }
    return r.output;
  }
};

}  // namespace oracle
