// SPDX-License-Identifier: MIT
/// Leader clustering: which slots join which before any is selected.
#pragma once

#include <algorithm>  // std::fill_n
#include <vector>

#include "kvmeld/search/match.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld::inline v0 {
namespace search {

/// Keys of leaders: `[dim, cosine_slots]` of every `cosine_slots` of them, so that a product with a
/// key is a weighted sum of rows, which reduces nothing. Summed in one order: equal keys have equal
/// products.
class leading_keys {
 public:
  leading_keys(index_t capacity, index_t dim) : dim_(dim) {
    const auto blocks = as_size((capacity + cosine_slots - 1) / cosine_slots);
    keys_.resize(blocks * cosine_slots * as_size(dim));
  }

  void add(index_t slot, const float* key, float norm) {
    float* const to = keys_.data() + place(count());
    for (index_t i = 0; i < dim_; ++i) {
      to[std::ptrdiff_t{i} * cosine_slots] = key[i];
    }
    slots_.push_back(slot), norms_.push_back(norm);
  }
  index_t count() const { return static_cast<index_t>(slots_.size()); }

  /// The nearest leader from the `first` one on to each of `key [count, dim]`, of norms `own`; into
  /// `best`, unless it holds a nearer one.
  void nearest(index_t first, const float* key, const float* own, index_t count,
               near_slot* best) const {
    float dots[max_cosine_rows * cosine_slots];
    while (first < this->count()) {
      const index_t held = std::min(cosine_slots - first % cosine_slots, this->count() - first);
      std::fill_n(dots, count * held, 0.0F);
      score::pv_tile(key, dim_, count,
                     {keys_.data() + place(first), dim_, held, Eigen::OuterStride<>(cosine_slots)},
                     dots);
      for (index_t c = 0; c < count; ++c) {
        take_nearest(dots + std::ptrdiff_t{c} * held, norms_.data() + first, own[c],
                     slots_.data() + first, held, -1, best[c]);
      }
      first += held;
    }
  }

 private:
  std::ptrdiff_t place(index_t leader) const {
    return std::ptrdiff_t{leader / cosine_slots} * cosine_slots * dim_ + leader % cosine_slots;
  }

  index_t dim_;
  std::vector<float> keys_, norms_;
  std::vector<index_t> slots_;
};

/// The slots that `work.marks` keeps are leaders. In descending order of `rank(s)` (ties to the
/// lower slot), each other slot joins its most similar leader, if their cosine is at least
/// `similarity`, or becomes one. Only the `max_joins` most similar joins are kept (ties to the
/// lower slot); the other slots stay separate. Into `work.row_of`: slot ↦ its leader. O(length ·
/// leaders · dim), several slots at a time with all leaders so far. Allocates: it is for prompts.
template <class Rank>
void join_leaders(const kv_head auto& head, Rank rank, float similarity, index_t max_joins,
                  slot_scratch& work) {
  const index_t dim = head.dim();
  const auto n = as_size(head.length()), d = as_size(dim);
  auto& numbers = work.numbers;
  numbers.resize(std::max(numbers.size(), n));
  const auto cosine = std::span(numbers).first(n);
  auto& into = work.row_of;
  auto& order = work.order;
  into.assign(n, -1);
  order.clear();
  leading_keys leaders(head.length(), dim);
  constexpr index_t slots_at_once = 32;
  std::vector<float> key(slots_at_once * d);  // [slots_at_once, dim] those in question
  float own[slots_at_once];
  const auto load = [&](index_t i, index_t s) {
    float* const to = key.data() + std::ptrdiff_t{i} * dim;
    to_floats(head.key(s), dim, to);
    score::row_norms({to, 1, dim, Eigen::OuterStride<>(dim)}, own + i);
  };
  for (index_t s = 0; s < head.length(); ++s) {
    if (work.marks[s] != 0) {
      into[s] = s;
      load(0, s);
      leaders.add(s, key.data(), own[0]);
    } else {
      order.push_back(s);
    }
  }
  const auto descending = [](auto number) {
    return [number](index_t s) { return detail::descending(number(s)); };
  };
  detail::sort_slots(order, descending(rank), work.keyed);
  const auto others = static_cast<index_t>(order.size());
  for (index_t begin = 0; begin < others; begin += slots_at_once) {
    const index_t count = std::min(slots_at_once, others - begin), before = leaders.count();
    near_slot nearest[slots_at_once];
    for (index_t i = 0; i < count; ++i) {
      load(i, order[begin + i]);
    }
    leaders.nearest(0, key.data(), own, count, nearest);
    for (index_t i = 0; i < count; ++i) {
      const index_t s = order[begin + i];
      const float* const own_key = key.data() + std::ptrdiff_t{i} * dim;
      near_slot& to = nearest[i];
      leaders.nearest(before, own_key, own + i, 1, &to);  // leaders added since
      const bool joins = to.slot >= 0 && to.cosine >= similarity;
      into[s] = joins ? to.slot : s;
      cosine[as_size(s)] = to.cosine;
      if (!joins) {
        leaders.add(s, own_key, own[i]);
      }
    }
  }
  std::erase_if(order, [&](index_t s) { return into[s] == s; });
  if (static_cast<index_t>(order.size()) > max_joins) {
    detail::select_slots(order, max_joins, descending(column_score(cosine)), work.keyed);
    for (const index_t s : std::span(order).subspan(as_size(max_joins))) {
      into[s] = s;
    }
  }
}

}  // namespace search
}  // namespace kvmeld::inline v0
