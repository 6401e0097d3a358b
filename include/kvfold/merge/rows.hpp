/// From each slot's destination to the rows of a plan.
#pragma once

#include <algorithm>  // std::ranges::sort
#include <span>
#include <tuple>

#include "kvfold/search/slot_scratch.hpp"

namespace kvfold {
inline namespace v0 {
namespace merge {

/// Calls `row(members)` for every row that `work.row_of` (slot ↦ anchor of its row, −1: evicted)
/// describes, by ascending anchor; `members` are the anchor, then the others ascending. They lie in
/// `work.order`. O(length log length).
template <class Row>
void for_each_row(slot_scratch& work, Row row) {
  const auto& into = work.row_of;
  auto& order = work.order;
  order.clear();
  for (std::size_t s = 0; s < into.size(); ++s) {
    if (into[s] >= 0) {
      order.push_back(static_cast<index_t>(s));
    }
  }
  const auto anchor = [&](index_t s) { return into[static_cast<std::size_t>(s)]; };
  std::ranges::sort(order, {}, [&](index_t s) { return std::tuple(anchor(s), s != anchor(s), s); });
  for (std::size_t begin = 0, end = 0; begin < order.size(); begin = end) {
    while (end < order.size() && anchor(order[end]) == anchor(order[begin])) {
      ++end;
    }
    row(std::span<const index_t>(order).subspan(begin, end - begin));
  }
}

}  // namespace merge
}  // namespace v0
}  // namespace kvfold
