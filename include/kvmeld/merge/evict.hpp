// SPDX-License-Identifier: MIT
/// Eviction, as most baselines do it: sinks and the latest are kept, then the best by score.
#pragma once

#include "kvmeld/merge/plan.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld {
inline namespace v0 {

/// Predicate of slots: is it one of the first `sinks` or the last `recent` positions?
auto protected_slots(const kv_head auto& head, index_t sinks, index_t recent) {
  return [&head, in = search::protect(head, sinks, recent)](index_t s) {
    return in(head.position(s));
  };
}
auto protected_slots(const kv_head auto& head, const protection& of) {
  return protected_slots(head, of.sinks, of.recent);
}

namespace merge {

/// The plan of an eviction: the marked slots as they are, without the others.
void keep_marked(const kv_head auto& head, const slot_scratch& work, merge_plan& out) {
  out.reset(head.length());
  for (index_t s = 0; s < head.length(); ++s) {
    if (work.marks[static_cast<std::size_t>(s)] != 0) {
      out.keep(s, head.log_mass(s));
    }
  }
}

}  // namespace merge

/// The plan that keeps the slots for which `is_protected(s)`, then those of the highest `score(s)`.
template <class Protected, class Score>
void evict(const kv_head auto& head, index_t target, Protected is_protected, Score score,
           slot_scratch& work, merge_plan& out) {
  search::select(head.length(), target, is_protected, score, work);
  merge::keep_marked(head, work, out);
}

}  // namespace v0
}  // namespace kvmeld
