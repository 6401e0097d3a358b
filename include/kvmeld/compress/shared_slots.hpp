// SPDX-License-Identifier: MIT
/// How slots that a model's heads share are divided between them: by one threshold over the scores.
#pragma once

#include <algorithm>   // std::min_element
#include <cmath>       // std::isnan
#include <cstdint>     // std::int64_t
#include <functional>  // std::greater
#include <limits>      // std::numeric_limits
#include <span>
#include <vector>

#include "kvmeld/compress/global_budgets.hpp"
#include "kvmeld/policies/traits.hpp"

namespace kvmeld::inline v0 {

/// How the slots of one head lie where heads share them: what `divide_slots` is told of a policy.
struct shared_slots {
  index_t own;     ///< that every head has, whatever its scores
  index_t sinks;   ///< of these at the beginning,
  index_t latest;  ///< and at the end
  index_t least;   ///< of the shared ones, that no head can do without
  index_t column;  ///< of the state that has the scores

  /// `fold` has clusters beside its pins, and may do without pins; `kvmerger` has what takes no
  /// part, heavy hitters by the highest scores, and one slot more; any other policy with a score
  /// has what it protects, and one slot more.
  template <class P>
  static shared_slots of(const P& p) {
    if constexpr (requires { p.visit([](const auto&) {}); }) {
      return p.visit([](const auto& one) { return of(one); });
    } else {
      const index_t least = traits::min_budget(p), sinks = std::min(least - 1, index_t{4});
      if constexpr (requires { p.slots_beside_pins(); }) {
        return {p.slots_beside_pins(), p.sinks, p.prompt_recent, 0, P::prompt_score};
      } else if constexpr (requires { p.shared_heavy(); }) {
        const index_t latest = p.shared_recent();
        return {p.sinks + latest, p.sinks, latest, p.shared_heavy() + 1, P::shared_score};
      } else {
        return {least - 1, sinks, least - 1 - sinks, 1, 0};
      }
    }
  }
};

/// The policy as it is where heads share `slots` each on average and have `slack` beside them.
/// Refused: a policy without a score per slot, or for the same tokens (`alike`) one that does not
/// evict by its score alone (`unsupported`); fewer slots than it can share.
template <class P>
P for_shared(P p, index_t slots, index_t slack = 0, bool alike = false) {
  expects(errc::unsupported, traits::shares(p), p.name(),
          ": expected a policy with a score per slot for shared budgets, got one without");
  if constexpr (requires { p.visit([](auto&) {}); }) {
    p.visit([&](auto& one) { one = for_shared(one, slots, slack, alike); });
    return p;
  }
  expects(errc::unsupported, !alike || !detail::makes_plans<const P>, p.name(),
          ": expected a policy that evicts by a score alone for the same tokens, got another");
  if constexpr (requires { p.sharing(slots, slack); }) {
    p = p.sharing(slots, slack);
  }
  return p;
}

/// Gives each of `heads` states of equal length, `state(i)`, the mean of their columns: heads of
/// the same tokens then evict the same. NaN of one is NaN of all.
void average_scores(index_t heads, const auto& state) {
  for (index_t c = 0; c < state(0).slot_stats(); ++c) {
    const std::span<float> mean = state(0).column(c);
    for (std::size_t s = 0; s < mean.size(); ++s) {
      double sum = 0;  // in which equal floats have themselves as their mean
      for (index_t i = 0; i < heads; ++i) {
        sum += state(i).column(c)[s];
      }
      mean[s] = static_cast<float>(sum / heads);
    }
    for (index_t i = 1; i < heads; ++i) {
      std::copy(mean.begin(), mean.end(), state(i).column(c).begin());
    }
  }
}

/// What the scores of `heads` that share slots are multiplied by before these are divided, of a
/// policy that wants it (`fold::leverage_exponent`); else none. `head(i)`: `head_ref`, `state(i)`:
/// of as many slots.
template <class P>
std::vector<std::vector<float>> score_weights(const P& p, std::size_t heads, const auto& head,
                                              const auto& state) {
  if constexpr (requires { p.visit([](const auto&) {}); }) {
    return p.visit([&](const auto& one) { return score_weights(one, heads, head, state); });
  } else if constexpr (requires { p.score_weights(heads, head, state); }) {
    return p.score_weights(heads, head, state);
  } else {
    return std::vector<std::vector<float>>(heads);
  }
}
/// Makes them part of a head's state.
template <class P>
void keep_weights(const P& p, std::span<const float> weights, head_state& state) {
  if constexpr (requires { p.visit([](const auto&) {}); }) {
    p.visit([&](const auto& one) { keep_weights(one, weights, state); });
  } else if constexpr (requires { p.keep_weights(weights, state); }) {
    p.keep_weights(weights, state);
  }
}

/// Adds the scores of a head's slots that may be shared out to the end of `scores`, in slot order:
/// neither sinks nor the latest tokens. `column [length]`: the state's, `shared.column`; `weights
/// [length]` multiply it, if there are any.
inline void add_shared_scores(const head_ref& head, std::span<const float> column,
                              const shared_slots& shared, std::vector<float>& scores,
                              std::span<const float> weights = {}) {
  const index_t end = head.next_position() - shared.latest;
  for (index_t s = 0; s < head.length(); ++s) {
    const index_t at = head.position(s);
    if (at >= shared.sinks && at < end) {
      scores.push_back(column[as_size(s)] * (weights.empty() ? 1.0F : weights[as_size(s)]));
    }
  }
}

/// Slots `[heads]` by one threshold over the scores of each head, `slots` a head on average. No
/// head gets more than the longest one holds, `longest` slots, nor more than its own `most [heads]`
/// (at least `slots`; empty: any), and what it cannot take goes to the others. Where the longest is
/// within `slots`, every head gets as many as it asked for, `slots`.
inline std::vector<index_t> divide_slots(const std::vector<std::vector<float>>& scores,
                                         const shared_slots& shared, index_t slots, index_t longest,
                                         std::span<const index_t> most = {}) {
  const auto heads = static_cast<index_t>(scores.size());
  if (longest <= slots) {
    return std::vector<index_t>(scores.size(), slots);
  }
  std::size_t widest = 1;
  for (const auto& s : scores) {
    widest = std::max(widest, s.size());
  }
  std::vector<float> all;  // heads of fewer slots are filled up with what nothing is below
  all.reserve(widest * scores.size());
  for (const auto& s : scores) {
    all.insert(all.end(), s.begin(), s.end());
    all.resize(all.size() + widest - s.size(), -std::numeric_limits<float>::infinity());
  }
  const index_t room = std::min(longest - shared.own - 1, static_cast<index_t>(widest)),
                mean = std::min(slots - shared.own, room);
  std::vector<index_t> own_most(scores.size(), room);
  for (std::size_t h = 0; h < most.size(); ++h) {
    own_most[h] = std::min(room, most[h] - shared.own);
  }
  auto more = global_budgets(all, static_cast<index_t>(std::int64_t{heads} * mean), own_most);
  // No policy can do without one slot more than what it protects: the heads that have most give.
  for (auto fewest = std::min_element(more.begin(), more.end()); *fewest < shared.least && mean > 0;
       fewest = std::min_element(more.begin(), more.end())) {
    ++*fewest, --*std::max_element(more.begin(), more.end());
  }
  for (index_t& n : more) {
    n += shared.own;
  }
  return more;
}

/// The same with equal slots for the `kv_heads` heads of each layer, each with its own tokens. A
/// layer's scores are the mean of its heads' best, of their second best, and so on, over those that
/// have one (composite tokens of KVCompose, Akulov et al. 2025).
inline std::vector<index_t> divide_by_layer(std::vector<std::vector<float>> scores,
                                            index_t kv_heads, const shared_slots& shared,
                                            index_t slots, index_t longest,
                                            std::span<const index_t> most = {}) {
  std::vector<std::vector<float>> layers(scores.size() / as_size(kv_heads));
  for (std::size_t l = 0; l < layers.size(); ++l) {
    std::vector<float> count;
    for (std::vector<float>& best :
         std::span(scores).subspan(l * as_size(kv_heads), as_size(kv_heads))) {
      std::erase_if(best, [](float score) { return std::isnan(score); });
      std::sort(best.begin(), best.end(), std::greater<>{});
      layers[l].resize(std::max(layers[l].size(), best.size()));
      count.resize(layers[l].size());
      for (std::size_t r = 0; r < best.size(); ++r) {
        layers[l][r] += (best[r] - layers[l][r]) / ++count[r];
      }
    }
  }
  std::vector<index_t> of_heads, of_layers;
  for (std::size_t h = 0; h < most.size(); h += as_size(kv_heads)) {
    of_layers.push_back(std::ranges::min(most.subspan(h, as_size(kv_heads))));
  }
  for (const index_t n : divide_slots(layers, shared, slots, longest, of_layers)) {
    of_heads.insert(of_heads.end(), as_size(kv_heads), n);
  }
  return of_heads;
}

/// Slots for each of as many heads as `most` says, `slots` on average, by their scores times
/// `weights [heads][slots]`, which it finds; equal ones for every `alike` heads. `most [heads]`: as
/// of `divide_slots`; `head(i)`, `state(i)`: as of `score_weights`.
template <class P>
std::vector<index_t> divide_by_scores(const P& p, const auto& head, const auto& state,
                                      index_t slots, std::span<const index_t> most, index_t alike,
                                      std::vector<std::vector<float>>& weights) {
  const std::size_t heads = most.size();
  const auto shared = shared_slots::of(p);
  index_t longest = 0;
  for (std::size_t i = 0; i < heads; ++i) {
    longest = std::max(longest, head(i).length());
  }
  weights.resize(heads);
  if (longest > slots) {
    weights = score_weights(p, heads, head, state);
  }
  std::vector<std::vector<float>> scores(heads);
  std::vector<float> of_slots(as_size(longest));
  for (std::size_t i = 0; i < heads; ++i) {
    const auto own = std::span(of_slots).first(as_size(head(i).length()));
    traits::shared_scores(p, head(i), state(i), own);
    add_shared_scores(head(i), own, shared, scores[i], weights[i]);
  }
  return alike > 1 ? divide_by_layer(std::move(scores), alike, shared, slots, longest, most)
                   : divide_slots(scores, shared, slots, longest, most);
}

}  // namespace kvmeld::inline v0
