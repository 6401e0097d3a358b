// SPDX-License-Identifier: MIT
/// From each slot's mark or destination to the rows of a plan.
#pragma once

#include <algorithm>  // std::fill_n, std::max
#include <span>
#include <utility>  // std::exchange

#include "kvmeld/merge/plan.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld::inline v0 {

/// Predicate of slots: is it one of the first `sinks` or the last `recent` positions?
auto protected_slots(const kv_head auto& head, index_t sinks, index_t recent) {
  return [&head, in = search::protect(head, sinks, recent)](index_t s) {
    return in(head.position(s));
  };
}
/// ... of what a policy protects.
auto protected_slots(const kv_head auto& head, const protection& of) {
  return protected_slots(head, of.sinks, of.recent);
}

namespace merge {

/// The plan of an eviction: the marked slots as they are, without the others.
void keep_marked(const kv_head auto& head, const slot_scratch& work, merge_plan& out) {
  const index_t n = head.length();
  out.reset(n);
  for (index_t first = 0, end = 0; first < n; first = end + 1) {
    for (end = first; end < n && work.marks[end] != 0; ++end) {
    }
    out.keep(first, {head.metadata().log_mass + first, as_size(end - first)});
  }
}

/// Calls `row(members)` for every row that `work.row_of` (slot ↦ anchor of its row, an anchor's
/// itself; −1: evicted) describes, by ascending anchor; `members` are the anchor, then the others
/// ascending. They lie in `work.order`. O(length).
template <class Row>
void for_each_row(slot_scratch& work, Row row) {
  const auto& into = work.row_of;
  const auto n = static_cast<index_t>(into.size());
  auto &order = work.order, &place = work.places;
  place.assign(into.size(), 0);  // of an anchor: its members, then where its next one belongs
  order.resize(into.size());
  for (const index_t anchor : into) {
    if (anchor >= 0) {
      ++place[anchor];
    }
  }
  index_t begin = 0;
  for (index_t s = 0; s < n; ++s) {
    if (into[s] == s) {
      order[begin] = s;
      begin += std::exchange(place[s], begin + 1);
    }
  }
  for (index_t s = 0; s < n; ++s) {
    if (into[s] >= 0 && into[s] != s) {
      order[place[into[s]]++] = s;
    }
  }
  begin = 0;
  for (index_t s = 0; s < n; ++s) {
    if (into[s] == s) {
      const index_t end = place[s];
      row(std::span<const index_t>(order).subspan(as_size(begin), as_size(end - begin)));
      begin = end;
    }
  }
}

/// Of those rows the `target` of largest `weight_of(members)` are kept, those of which
/// `always(anchor)` first; the slots of others are evicted.
template <class Always, class Weight>
void keep_rows(index_t length, index_t target, Always always, Weight weight_of,
               slot_scratch& work) {
  auto& weight = work.numbers;
  weight.resize(std::max(weight.size(), as_size(length)));
  std::fill_n(weight.begin(), length, lowest_score);  // no anchors
  index_t rows = 0;
  for_each_row(work, [&](std::span<const index_t> members) {
    weight[as_size(members[0])] = weight_of(members);
    ++rows;
  });
  if (rows <= target) {
    return;
  }
  search::select(length, target, always, search::column_score(weight), work);
  for (index_t& to : work.row_of) {
    to = work.marks[to] != 0 ? to : -1;
  }
}

/// Those rows as a plan. A slot that stays alone is kept as it is; of others `merged(members)` adds
/// the sources to `out`, and says the log-mass.
template <class Merged>
void write_rows(const kv_head auto& head, slot_scratch& work, merge_plan& out, Merged merged) {
  out.reset(head.length());
  for_each_row(work, [&](std::span<const index_t> members) {
    if (members.size() == 1) {
      out.keep(members[0], head.log_mass(members[0]));
    } else {
      out.end_row(merged(members));
    }
  });
}

}  // namespace merge

/// The plan that keeps the slots for which `is_protected(s)`, then those of the highest `score(s)`.
template <class Protected, class Score>
void evict(const kv_head auto& head, index_t target, Protected is_protected, Score score,
           slot_scratch& work, merge_plan& out) {
  search::select(head.length(), target, is_protected, score, work);
  merge::keep_marked(head, work, out);
}

}  // namespace kvmeld::inline v0
