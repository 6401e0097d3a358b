/// Eviction, as most baselines do it: sinks and the latest stay, then the best by score.
#pragma once

#include "kvfold/search/select.hpp"

namespace kvfold {

/// `protect` by slot, as `select` asks.
auto protected_slots(const kv_head auto& head, index_t sinks, index_t recent) {
  return [&head, in = protect(head, sinks, recent)](index_t s) { return in(head.position(s)); };
}

/// The plan that keeps the slots for which `is_protected(s)`, then those of the highest `score(s)`.
template <class Protected, class Score>
void evict(const kv_head auto& head, index_t target, Protected is_protected, Score score,
           merge_plan& out) {
  select(head.length(), target, is_protected, score, out);
  keep_marked(head, out);
}

}  // namespace kvfold
