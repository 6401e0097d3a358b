// SPDX-License-Identifier: MIT
/// How slots that a model's heads share are divided between them: by one threshold over the scores.
#pragma once

#include <algorithm>  // std::ranges::min_element
#include <cstdint>    // std::int64_t
#include <limits>     // std::numeric_limits
#include <span>
#include <vector>

#include "kvmeld/compress/global_budgets.hpp"
#include "kvmeld/policies/traits.hpp"

namespace kvmeld::inline v0::detail {

/// How the slots of one head lie where heads share them.
struct shared_slots {
  index_t own;     ///< that every head has, whatever its scores
  index_t sinks;   ///< of these at the beginning,
  index_t latest;  ///< and at the end
  index_t least;   ///< of the shared ones, that no head can do without
  index_t column;  ///< of the state that has the scores

  /// `fold` has clusters beside its pins, and may do without pins; any other policy with a score
  /// has what it protects, and one slot more.
  template <class P>
  static shared_slots of(const P& p) {
    if constexpr (requires { p.visit([](const auto&) {}); }) {
      return p.visit([](const auto& one) { return of(one); });
    } else {
      const index_t least = traits::min_budget(p), sinks = std::min(least - 1, index_t{4});
      if constexpr (requires { p.slots_beside_pins(); }) {
        return {p.slots_beside_pins(), p.sinks, p.prompt_recent, 0, P::prompt_score};
      } else {
        return {least - 1, sinks, least - 1 - sinks, 1, 0};
      }
    }
  }
};

/// The policy as it is where heads share `slots` each on average and have `slack` beside them.
template <class P>
P for_shared(P p, index_t slots, index_t slack) {
  if constexpr (requires { p.visit([](auto&) {}); }) {
    p.visit([&](auto& one) { one = for_shared(one, slots, slack); });
  } else if constexpr (requires { p.sharing(slots, slack); }) {
    p = p.sharing(slots, slack);
  }
  return p;
}

/// The scores of a head's slots that may be shared out, in slot order, at the end of `scores`:
/// neither sinks nor the latest tokens.
inline void add_shared_scores(const auto& head, std::span<const float> column,
                              const shared_slots& shared, std::vector<float>& scores) {
  const index_t end = head.next_position() - shared.latest;
  for (index_t s = 0; s < head.length(); ++s) {
    const index_t at = head.position(s);
    if (at >= shared.sinks && at < end) {
      scores.push_back(column[static_cast<std::size_t>(s)]);
    }
  }
}

/// Slots `[heads]` for scores of each: `mean` a head on average beside its own, at most `most`.
inline std::vector<index_t> divide_slots(const std::vector<std::vector<float>>& scores,
                                         const shared_slots& shared, index_t mean, index_t most) {
  const auto heads = static_cast<index_t>(scores.size());
  std::size_t longest = 1;
  for (const auto& s : scores) {
    longest = std::max(longest, s.size());
  }
  std::vector<float> all;  // heads of fewer slots are filled up with what nothing is below
  all.reserve(longest * scores.size());
  for (const auto& s : scores) {
    all.insert(all.end(), s.begin(), s.end());
    all.resize(all.size() + longest - s.size(), -std::numeric_limits<float>::infinity());
  }
  most = std::min(most, static_cast<index_t>(longest));
  const std::int64_t total = std::min(std::int64_t{heads} * mean, std::int64_t{heads} * most);
  auto more = global_budgets(all, heads, static_cast<index_t>(total), most);
  // No policy can do without one slot more than what it protects: the heads that have most give.
  for (auto fewest = std::ranges::min_element(more); *fewest < shared.least && total > 0;
       fewest = std::ranges::min_element(more)) {
    ++*fewest, --*std::ranges::max_element(more);
  }
  for (index_t& slots : more) {
    slots += shared.own;
  }
  return more;
}

}  // namespace kvmeld::inline v0::detail
