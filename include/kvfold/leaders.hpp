/// Leader clustering: who joins whom before anybody is selected.
#pragma once

#include <algorithm>  // std::nth_element

#include "kvfold/match.hpp"
#include "kvfold/select.hpp"

namespace kvfold {

/// Walks the slots that `out.marks()` keeps, which lead, then the others by falling `rank(s)` (ties
/// to the lower slot): one whose most similar leader is at least `similarity` near joins it, every
/// other becomes a leader. Of the joins the `most` most similar count (ties to the lower slot); who
/// then does not join stays alone. Into `out.row_of()`: slot ↦ its leader. O(length · leaders ·
/// dim).
template <class Rank>
void join_leaders(const kv_head auto& head, Rank rank, float similarity, index_t most,
                  merge_plan& out) {
  const auto n = static_cast<std::size_t>(head.length());
  auto& numbers = out.numbers();
  numbers.resize(std::max(numbers.size(), 2 * n));
  const auto cosine = std::span(numbers).first(n), norm = std::span(numbers).subspan(n, n);
  for (std::size_t s = 0; s < n; ++s) {
    norm[s] = key_norm(head, static_cast<index_t>(s));
  }
  auto& into = out.row_of();
  auto& order = out.order();
  into.assign(n, -1);
  order.clear();
  for (index_t s = 0; s < head.length(); ++s) {
    if (out.marks()[static_cast<std::size_t>(s)] != 0) {
      into[static_cast<std::size_t>(s)] = s;
    } else {
      order.push_back(s);
    }
  }
  const auto falling = [](auto number) {
    return [number](index_t a, index_t b) {
      const auto x = number(a), y = number(b);
      return x > y || (x == y && a < b);
    };
  };
  std::ranges::sort(order, falling(rank));
  const auto leads = [&](index_t s) { return into[static_cast<std::size_t>(s)] == s; };
  for (const index_t s : order) {
    near_slot to;  // leaders are few: only their products are made
    for (index_t r = 0; r < head.length(); ++r) {
      if (leads(r)) {
        const float u = kvfold::cosine(head, s, r, norm[static_cast<std::size_t>(s)],
                                       norm[static_cast<std::size_t>(r)]);
        to = to.slot < 0 || u > to.cosine ? near_slot{r, u} : to;
      }
    }
    const bool joins = to.slot >= 0 && to.cosine >= similarity;
    into[static_cast<std::size_t>(s)] = joins ? to.slot : s;
    cosine[static_cast<std::size_t>(s)] = to.cosine;
  }
  std::erase_if(order, leads);
  if (static_cast<index_t>(order.size()) > most) {
    std::nth_element(order.begin(), order.begin() + most, order.end(), falling(by(cosine)));
    for (const index_t s : std::span(order).subspan(static_cast<std::size_t>(most))) {
      into[static_cast<std::size_t>(s)] = s;
    }
  }
}

}  // namespace kvfold
