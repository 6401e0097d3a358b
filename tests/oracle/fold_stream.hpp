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

inline void fold::remember(head& h, const placed_queries& latest) const {
  fold_memory& m = h.memory;
  for (std::size_t i = 0; i < latest.queries.size(); ++i) {
    mat rounded = latest.queries[i];
    for (vec& q : rounded)
      for (double& x : q) x = in_bfloat16(x);
    m.queries.push_back({latest.positions[i], rounded});
  }
  const auto most = static_cast<std::ptrdiff_t>(window * stride);
  const auto held = static_cast<std::ptrdiff_t>(m.queries.size());
  if (held > most) m.queries.erase(m.queries.begin(), m.queries.begin() + (held - most));
}

inline void fold::prompt(head& h, const tensor& given, const std::vector<int>& positions,
                         int target) const {
  const placed_queries all{given, positions_or_last(h, given.size(), positions)};
  remember(h, all);
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
  for (std::size_t back = 0; back < all.size() && static_cast<int>(some.queries.size()) < window;
       back += static_cast<std::size_t>(stride)) {
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
  const std::vector<bool> fixed =
      pinned(h, protected_slots(h, sinks, latest),
             leverage(unrotated_keys(h, rotation), leverage_ridge), most);
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
  for (std::size_t j = 0; j < n; ++j)
    if (!is_removed[j])
      made.slots.push_back(members[j].size() == 1 ? h.slots[j] : merged(h, m, j, members[j]));
  h = made;
}

inline mat fold::step(head& h, const mat& q, const vec& k, const vec& v, int target,
                      int trigger) const {
  append(h, k, v);
  const mat output = attend(h, q).output;
  remember(h, {{q}, {newest(h)}});
  if (triggered(h, target, trigger)) {
    if (trigger > 0)
      compress_step(h, trigger - 1, target);
    else
      compress_step(h, target, target + 1 - period);
  }
  return output;
}

}  // namespace oracle
