// SPDX-License-Identifier: MIT
// Baselines that score by the attention received: TOVA, Scissorhands, RoCo, CaM.
#pragma once

#include <cstdint>

#include "oracle/policies.hpp"

namespace oracle {

/// In [0, 1), the same for the same seed and position on every side: the finaliser of splitmix64,
/// the upper 24 bits (so that a float holds it exactly).
inline double unit_random(std::uint64_t seed, int position) {
  std::uint64_t z = seed + static_cast<std::uint64_t>(position) * 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  z = z ^ (z >> 31);
  return static_cast<double>(z >> 40) / 16777216.0;
}

/// What one query tells of each slot: its attention over the slots it may see, summed over heads.
struct sight {
  std::vector<bool> visible;  // [slots]
  vec attention;              // [slots], 0 where not visible
  int seen = 0;               // slots that are visible
};
inline sight look(const head& h, const mat& q, int position) {
  sight s;
  s.visible = seen_from(h, position);
  s.seen = static_cast<int>(std::count(s.visible.begin(), s.visible.end(), true));
  s.attention = combined(attend(h, q, position).probabilities, combine::sum);
  return s;
}

/// Policies whose decode is: append, attend, take notice of the query, evict.
template <class Policy>
mat plain_step(const Policy& policy, head& h, const mat& q, const vec& k, const vec& v, int target,
               int trigger) {
  append(h, k, v);
  const mat output = attend(h, q).output;
  policy.observe(h, q, newest(h));
  if (triggered(h, target, trigger)) policy.evict_to(h, target);
  return output;
}

/// TOVA (arXiv 2401.06104): the attention of the latest query alone. The paper has no sinks.
struct tova {
  int sinks = 4;

  void evict_to(head& h, int target) const {
    vec score;
    for (const slot& s : h.slots) score.push_back(s.score);
    evict(h, protected_slots(h, sinks, 0), score, target);
  }
  void observe(head& h, const mat& q, int position) const {
    const sight s = look(h, q, position);
    for (std::size_t j = 0; j < h.slots.size(); ++j) h.slots[j].score = s.attention[j];
  }
  void prompt(head& h, const tensor& queries, const std::vector<int>& positions, int target) const {
    const std::vector<int> at = positions_or_last(h, queries.size(), positions);
    if (!queries.empty()) observe(h, queries.back(), at.back());
    evict_to(h, target);
  }
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    return plain_step(*this, h, q, k, v, target, trigger);
  }
};

/// Scissorhands (arXiv 2305.17118, algorithm 2): how often a slot got less than its fair share.
///
/// A query that sees n slots gives one a low mark when its attention, meant over the heads of the
/// group, is below 1/n. Kept: the slots with the fewest low marks. The paper counts over the last
/// `history` queries; here the count is over this window of `history` queries and the one before
/// (as snapkv and EMS do), which needs two numbers a slot. A prompt's last `history` queries are
/// the window before. The paper drops half the cache at once; here that is the trigger's business.
struct scissorhands {
  int sinks = 4;
  int window = 10;
  int history = 400;

  static bool low(const head& h, const sight& s, std::size_t j) {
    return s.visible[j] && s.attention[j] / h.group < 1.0 / s.seen;
  }
  void evict_to(head& h, int target) const {
    vec score;
    for (const slot& s : h.slots) score.push_back(-(s.past + s.current));
    evict(h, protected_slots(h, sinks, window), score, target, exact);
  }
  void prompt(head& h, const tensor& queries, const std::vector<int>& positions, int target) const {
    const std::vector<int> at = positions_or_last(h, queries.size(), positions);
    for (slot& s : h.slots) s.past = s.current = 0;
    const std::size_t n = queries.size(), most = static_cast<std::size_t>(history);
    for (std::size_t i = n > most ? n - most : 0; i < n; ++i) {
      const sight s = look(h, queries[i], at[i]);
      for (std::size_t j = 0; j < h.slots.size(); ++j) h.slots[j].past += low(h, s, j) ? 1 : 0;
    }
    h.queries_seen = 0;
    evict_to(h, target);
  }
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    append(h, k, v);
    const mat output = attend(h, q).output;
    const sight s = look(h, q, newest(h));
    for (std::size_t j = 0; j < h.slots.size(); ++j) h.slots[j].current += low(h, s, j) ? 1 : 0;
    if (++h.queries_seen >= history) {
      for (slot& x : h.slots) {
        x.past = x.current;
        x.current = 0;
      }
      h.queries_seen = 0;
    }
    if (triggered(h, target, trigger)) evict_to(h, target);
    return output;
  }
};

/// RoCo (arXiv 2402.06262): mean attention per query that could see the slot; the slots whose
/// attention varies most are kept whatever their mean.
///
/// The mean and the standard deviation (of the population) are of the attention summed over the
/// group. Kept: sinks, the last `window`, then floor(steady target + .5) - window of the others by
/// standard deviation (the authors' code counts the window in), then by mean. Never seen: both 0.
struct roco {
  int sinks = 4;
  int window = 10;
  double steady = 0.3;  // share of the budget

  static double mean(const slot& s) { return s.observed > 0 ? s.score / s.observed : 0; }
  static double deviation(const slot& s) {
    if (s.observed == 0) return 0;
    return std::sqrt(std::max(0.0, s.squares / s.observed - mean(s) * mean(s)));
  }
  void evict_to(head& h, int target) const {
    std::vector<bool> keep = protected_slots(h, sinks, window);
    vec means, deviations;
    std::vector<std::size_t> others;
    for (std::size_t j = 0; j < h.slots.size(); ++j) {
      means.push_back(mean(h.slots[j]));
      deviations.push_back(deviation(h.slots[j]));
      if (!keep[j]) others.push_back(j);
    }
    const int room = target - static_cast<int>(keep.size() - others.size());
    const int count = std::min(room, share(steady, target) - window);
    for (std::size_t j : top(deviations, others, static_cast<std::size_t>(std::max(0, count))))
      keep[j] = true;
    evict(h, keep, means, target);
  }
  void observe(head& h, const mat& q, int position) const {
    const sight s = look(h, q, position);
    for (std::size_t j = 0; j < h.slots.size(); ++j) {
      if (!s.visible[j]) continue;
      h.slots[j].score += s.attention[j];
      h.slots[j].squares += s.attention[j] * s.attention[j];
      h.slots[j].observed += 1;
    }
  }
  void prompt(head& h, const tensor& queries, const std::vector<int>& positions, int target) const {
    const std::vector<int> at = positions_or_last(h, queries.size(), positions);
    for (std::size_t i = 0; i < queries.size(); ++i) observe(h, queries[i], at[i]);
    evict_to(h, target);
  }
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    return plain_step(*this, h, q, k, v, target, trigger);
  }
};

/// CaM (Zhang et al., ICML 2024, "Cache Merging for memory-efficient LLMs inference"), as the
/// authors' code for HELM has it: StreamingLLM's choice of what leaves, but by chance the value of
/// a token goes into those of the tokens that follow it.
///
/// Kept: the sinks, and the latest. A token i that leaves has as recipients the next `merge` kept
/// slots by position (fewer in a shorter window). With probability clamp(a_i / mean a, 0, 1), a the
/// attention of the step's own query and the mean over all kept slots behind i, v_i / (number of
/// recipients) is added to each recipient's value; keys and log-mass are untouched. Mean 0:
/// probability 1 if a_i > 0, else 0. Chance: unit_random(seed, position of i) < probability.
/// Several that leave at once add their values as they were. A prompt only drops tokens.
struct cam {
  int sinks = 4;
  int merge = 32;
  std::uint64_t seed = 0;

  void evict_to(head& h, int target) const {
    head after = h;
    streaming_llm{.sinks = sinks}.evict_to(after, target);
    for (const slot& leaves : h.slots) {
      std::vector<slot*> behind;
      bool stays = false;
      for (slot& s : after.slots) {
        stays = stays || s.position == leaves.position;
        if (s.position > leaves.position) behind.push_back(&s);
      }
      if (stays || behind.empty()) continue;
      double mean = 0;
      for (const slot* s : behind) mean += s->score / static_cast<double>(behind.size());
      const double p = mean > 0 ? std::min(1.0, leaves.score / mean) : (leaves.score > 0 ? 1 : 0);
      if (unit_random(seed, leaves.position) >= p) continue;
      std::sort(behind.begin(), behind.end(),
                [](const slot* a, const slot* b) { return a->position < b->position; });
      behind.resize(std::min(behind.size(), static_cast<std::size_t>(merge)));
      for (slot* s : behind)
        for (std::size_t i = 0; i < s->value.size(); ++i)
          s->value[i] += leaves.value[i] / static_cast<double>(behind.size());
    }
    h = after;
  }
  void prompt(head& h, const tensor&, const std::vector<int>&, int target) const {
    for (slot& s : h.slots) s.score = 0;
    evict_to(h, target);
  }
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    append(h, k, v);
    const attention r = attend(h, q);
    const vec a = combined(r.probabilities, combine::sum);
    for (std::size_t j = 0; j < a.size(); ++j) h.slots[j].score = a[j];
    if (triggered(h, target, trigger)) evict_to(h, target);
    return r.output;
  }
};

}  // namespace oracle
