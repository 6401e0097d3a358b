/// Eviction, as most baselines do it: sinks and the latest stay, then the best by score.
#pragma once

#include "kvfold/search/select.hpp"

namespace kvfold {

/// `protect` by slot, as `select` asks.
auto protected_slots(const kv_head auto& head, index_t sinks, index_t recent) {
  return [&head, in = protect(head, sinks, recent)](index_t s) { return in(head.position(s)); };
}

/// The plan that keeps the slots for which `stays(s)`, then those of the highest `score(s)`.
template <class Stays, class Score>
void evict(const kv_head auto& head, index_t target, Stays stays, Score score, merge_plan& out) {
  select(head.length(), target, stays, score, out);
  keep_marked(head, out);
}

}  // namespace kvfold
