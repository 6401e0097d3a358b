// SPDX-License-Identifier: MIT
// fold while decoding: its memory, and the slots that it folds away. Included by oracle_fold.hpp.
//
// Readings that the library follows:
//  - With trigger 0 the cache never holds more than `target` after a step: when it would, it goes
//    down to target + 1 - period, as the prototype does. With a trigger it goes down to `target`
//    when there are `trigger` slots. The budget that the share of outliers is taken of is the most
//    slots that stay: `target`, or trigger - 1.
//  - The memory: queries of the last window * stride steps with their positions, rounded to
//    bfloat16. A prompt goes into it too: its last queries.
//  - Leverage is among the slots that there are, each counted once, as after a prompt.
//  - By scores, a head that holds no prompt's: all slots but the sinks, the latest and the clusters
//    are outliers, and two more may always be folded away. The latest are fewer where that many
//    would leave less than a quarter of the clusters' slots.
//  - With `rescore`, by scores: the memory has the queries of that many steps and of one before,
//    each with its step's log-sum-exp; after so many steps all slots are scored by them, without
//    leverage, at up to 512 positions to come, and keep the largest. A prompt's queries have scored
//    there; they are held evenly spread. Pinned are the latest, those unscored in addition, and the
//    best by score that hold one token; clusters have as many slots as after a prompt, less where
//    too few would be left. The gain is a prompt's, save for sinks and the latest, `rescore` of
//    them at least.
//  - Masses are tied as they are computed: "a slot of larger mass" includes one of equal mass.
#pragma once

#include "oracle/fold.hpp"

namespace oracle {

/// The number with eight bits that is nearest, ties to an even last one.
inline double in_bfloat16(double x) {
  int exponent = 0;
  const double fraction = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(fraction, 8)), exponent - 8);
}

inline void fold::remember(head& h, const placed_queries& latest, const mat& own) const {
  fold_memory& m = h.memory;
  m.unscored = own.empty() ? 0 : m.unscored + 1;
  for (std::size_t i = 0; i < latest.queries.size(); ++i) {
    mat rounded = latest.queries[i];
    for (vec& q : rounded)
      for (double& x : q) x = in_bfloat16(x);
    m.queries.push_back({latest.positions[i], rounded});
    m.own.push_back(own.empty() ? vec(rounded.size(), std::numeric_limits<double>::infinity())
                                : own[i]);
  }
  const auto most = static_cast<std::ptrdiff_t>(rescore > 0 ? rescore + 1 : window * stride);
  const auto held = static_cast<std::ptrdiff_t>(m.queries.size());
  if (held > most) {
    m.queries.erase(m.queries.begin(), m.queries.begin() + (held - most));
    m.own.erase(m.own.begin(), m.own.begin() + (held - most));
  }
}

inline void fold::score_decoded(head& h) const {
  tensor all;
  std::vector<int> at;
  for (const auto& [position, q] : h.memory.queries) all.push_back(q), at.push_back(position);
  const vec s = lookahead_max{.horizon = 512, .rotation = rotation, .outliers = false}.with(
      h, all, at, h.memory.own, newest(h) + 1);
  for (std::size_t j = 0; j < s.size(); ++j) h.slots[j].score = std::max(h.slots[j].score, s[j]);
}

/// `raised`: the least log-mass of what is pinned by score and not among the latest.
inline std::vector<bool> fold::pinned_by_scores(const head& h, int keep, double& raised) const {
  const int free = keep - sinks - recent;
  const int merged =
      clusters > 0 ? clusters
                   : std::max(1, static_cast<int>(std::floor((1 - score_share) * free + 0.5)));
  const int latest = std::min(recent + h.memory.unscored, keep - sinks - 2);
  const int most = std::min(free - merged - h.memory.unscored, keep - sinks - latest - 2);
  std::vector<bool> pin = protected_slots(h, sinks, latest);
  std::vector<std::size_t> scored;
  vec score;
  for (std::size_t j = 0; j < h.slots.size(); ++j) {
    score.push_back(h.slots[j].score);
    if (!pin[j] && h.slots[j].single && score[j] > 0) scored.push_back(j);
  }
  for (const std::size_t j : top(score, scored, static_cast<std::size_t>(std::max(most, 0))))
    pin[j] = true;
  const auto kept = static_cast<double>(std::count(pin.begin(), pin.end(), true));
  raised = log_gain(pin_gain, kept, mean_slots, newest(h) + 1.0);
  return pin;
}

inline void fold::prompt(head& h, const tensor& given, const std::vector<int>& positions,
                         int target) const {
  const placed_queries all{given, positions_or_last(h, given.size(), positions)};
  placed_queries some;  // of so many as are held, evenly spread
  for (std::size_t i = 0, n = std::min(given.size(), static_cast<std::size_t>(rescore + 1)); i < n;
       ++i) {
    some.queries.push_back(given[i * given.size() / n]);
    some.positions.push_back(all.positions[i * given.size() / n]);
  }
  remember(h, rescore > 0 ? some : all);
  mat rows;
  if (lookahead) {
    rows = foreseen(spread(all, queries), newest(h) + 1, where, rotation);
  } else {
    for (const mat& q : given) rows.insert(rows.end(), q.begin(), q.end());
  }
  compress(h, rows, target);
}

/// Every stride-th of the kept queries, the newest included, moved to the positions to come.
inline mat fold::remembered(const head& h) const {
  placed_queries some;
  const auto& all = h.memory.queries;
  const int most = rescore > 0 ? rescore + 1 : window, apart = rescore > 0 ? 1 : stride;
  for (std::size_t back = 0; back < all.size() && static_cast<int>(some.queries.size()) < most;
       back += static_cast<std::size_t>(apart)) {
    const auto& [position, q] = all[all.size() - 1 - back];
    some.queries.insert(some.queries.begin(), q);
    some.positions.insert(some.positions.begin(), position);
  }
  if (!lookahead) {
    mat rows;
    for (const mat& q : some.queries) rows.insert(rows.end(), q.begin(), q.end());
    return rows;
  }
  return foreseen(some, newest(h) + 1, where, rotation);
}

/// Folds slots away until `keep` are left; outliers are a share of `budget`.
inline void fold::compress_step(head& h, int budget, int keep) const {
  const std::size_t n = h.slots.size();
  int latest = decode_recent, most = 0;
  if (by_scores) {
    const int free = budget - sinks - recent;
    const int merged =
        clusters > 0 ? clusters : static_cast<int>(std::floor((1 - score_share) * free + 0.5));
    latest = std::min(decode_recent, recent + 3 * merged / 4);
    most = std::min(free - merged, keep - sinks - latest - 2);
  } else {
    // As many as the budget allows, but a quarter of what `keep` slots would merge into stays free.
    const int merged = std::max(
        1,
        (keep - sinks - decode_recent - outlier_count(outliers, keep, sinks, decode_recent)) / 4);
    most = std::min(outlier_count(outliers, budget, sinks, decode_recent),
                    keep - sinks - decode_recent - merged);
  }
  double raised = 0;
  const std::vector<bool> fixed =
      rescore > 0 ? pinned_by_scores(h, keep, raised)
                  : pinned(h, protected_slots(h, sinks, latest),
                           leverage(unrotated_keys(h, rotation), leverage_ridge), most);
  const std::vector<bool> ungained = protected_slots(
      h, sinks, std::max(rescore, std::min(recent + h.memory.unscored, keep - sinks - 2)));
  const measure m = measured(h, remembered(h));
  const auto cost = [&](std::size_t i, std::size_t j) {  // Ward
    return m.mass[i] * m.mass[j] / (m.mass[i] + m.mass[j]) *
           squared_distance(h.slots[i].key, h.slots[j].key);
  };
  // The victims: least cost to a slot at least as heavy.
  std::vector<std::size_t> free;
  vec gain(n, -std::numeric_limits<double>::infinity());
  for (std::size_t i = 0; i < n; ++i) {
    if (fixed[i]) continue;
    free.push_back(i);
    for (std::size_t j = 0; j < n; ++j)
      if (j != i && !fixed[j] && m.mass[i] <= m.mass[j]) gain[i] = std::max(gain[i], -cost(i, j));
  }
  const int removed = static_cast<int>(n) - keep;
  if (keep < 1 || removed >= static_cast<int>(free.size()))
    throw std::invalid_argument("oracle: expected more slots that may be merged");
  std::vector<bool> is_removed(n, false);
  for (std::size_t i : top(gain, free, static_cast<std::size_t>(removed))) is_removed[i] = true;
  // Each goes to the kept slot of least cost.
  std::vector<std::vector<std::size_t>> members(n);
  for (std::size_t i = 0; i < n; ++i) {
    std::size_t into = i;
    for (std::size_t j = 0; j < n && is_removed[i]; ++j)
      if (!fixed[j] && !is_removed[j] && (into == i || cost(i, j) < cost(i, into))) into = j;
    members[into].push_back(i);
  }
  head made = h;
  made.slots.clear();
  for (std::size_t j = 0; j < n; ++j) {
    if (is_removed[j]) continue;
    made.slots.push_back(members[j].size() == 1 ? h.slots[j] : merged(h, m, j, members[j]));
    double& own = made.slots.back().log_mass;
    if (fixed[j] && !ungained[j] && raised > own) own = raised;
  }
  h = made;
}

inline mat fold::step(head& h, const mat& q, const vec& k, const vec& v, int target,
                      int trigger) const {
  append(h, k, v);
  const auto seen = attend(h, q);
  remember(h, {{q}, {newest(h)}}, {seen.lse});
  if (by_scores && rescore > 0 && h.memory.unscored == rescore) {
    score_decoded(h);
    h.memory.unscored = 0;
  }
  if (triggered(h, target, trigger)) {
    if (trigger > 0)
      compress_step(h, trigger - 1, target);
    else
      compress_step(h, target, target + 1 - period);
  }
  return seen.output;
}

}  // namespace oracle
