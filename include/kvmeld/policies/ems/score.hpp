// SPDX-License-Identifier: MIT
/// EMS's Global-Local score.
#pragma once

#include <algorithm>  // std::max
#include <cmath>      // std::isnan
#include <vector>

#include "kvmeld/policies/ems/table.hpp"
#include "kvmeld/score/scorers.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld {
inline namespace v0 {
namespace detail {

/// Eq. 2, token ↦ score: s = max(s_glo · mean(s_loc)/mean(s_glo), s_loc), s_loc = past + current;
/// the means over all tokens held. NaN counts for its own token only.
template <class State>
auto global_local(const ems_table<State>& table, index_t length) {
  using t = ems_table<State>;
  const auto local = [table](index_t token) {
    return table.at(t::past, token) + table.at(t::current, token);
  };
  double all = 0, in_windows = 0;
  for (index_t s = 0; s < length; ++s) {
    table.each(s, [&](index_t token) {
      const float glo = table.at(t::all, token), loc = local(token);
      if (!std::isnan(glo + loc)) {
        all += double{glo};
        in_windows += double{loc};
      }
    });
  }
  const auto scale = static_cast<float>(all > 0 ? in_windows / all : 0.0);
  return [table, local, scale](index_t token) {
    return std::max(table.at(t::all, token) * scale, local(token));
  };
}

/// After a prompt: `score` averaged over `kernel` neighbours in position, among the tokens outside
/// the window. By token, `[table.names()]`.
template <class State, class Score>
std::vector<float> pooled_scores(const kv_head auto& head, const ems_table<State>& table,
                                 Score score, index_t window, index_t kernel) {
  std::vector<float> s(static_cast<std::size_t>(table.names()));
  std::vector<index_t> outside;
  const auto in_window = search::protect(head, 0, window);
  for (index_t slot = 0; slot < head.length(); ++slot) {
    table.each(slot, [&](index_t token) {
      s[static_cast<std::size_t>(token)] = score(token);
      if (!in_window(table.position(head, token))) {
        outside.push_back(token);
      }
    });
  }
  std::vector<detail::keyed_slot> keyed;
  detail::sort_slots(
      outside, [&](index_t token) { return detail::ascending(table.position(head, token)); },
      keyed);
  score::average_pool(outside, kernel, false, s);
  return s;
}

/// Slot ↦ the sum of its tokens' scores.
template <class State, class Score>
auto entry_weight(const ems_table<State>& tokens, Score score) {
  return [tokens, score](index_t s) {
    float sum = 0;
    tokens.each(s, [&](index_t t) { sum += score(t); });
    return sum;
  };
}

}  // namespace detail
}  // namespace v0
}  // namespace kvmeld
