// SPDX-License-Identifier: MIT
/// How slots that a model's heads share are divided between them: by one threshold over the scores.
#pragma once

#include <algorithm>   // std::min_element
#include <cmath>       // std::isnan
#include <cstdint>     // std::int64_t
#include <functional>  // std::function, std::greater
#include <limits>      // std::numeric_limits
#include <span>
#include <vector>

#include "kvmeld/compress/budgets.hpp"
#include "kvmeld/memory/reserved.hpp"
#include "kvmeld/policies/declared.hpp"

namespace kvmeld::inline v0 {

namespace detail {

/// Calls `f` with the policy itself, or of one chosen at run time with that inside.
template <class P>
decltype(auto) inside(const P& p, const auto& f) {
  if constexpr (chosen_at_run_time<P>) {
    return p.visit(f);
  } else {
    return f(p);
  }
}

}  // namespace detail

/// How the slots of one head lie where heads share them: what `divide_slots` is told of a policy.
struct shared_slots {
  index_t own;     ///< that every head has, whatever its scores
  index_t sinks;   ///< of these at the beginning,
  index_t latest;  ///< and at the end
  index_t least;   ///< of the shared ones, that no head can do without

  /// `fold` has clusters in addition to its pins, and may do without pins; `kvmerger` has what
  /// takes no part, heavy hitters by the highest scores, and one slot more; any other policy with a
  /// score has what it protects, and one slot more.
  template <class P>
  static shared_slots of(const P& p) {
    return detail::inside(p, [](const auto& one) -> shared_slots {
      if constexpr (requires { one.slots_beside_pins(); }) {
        return {one.slots_beside_pins(), one.sinks, one.prompt_recent, 0};
      } else if constexpr (requires { one.shared_heavy(); }) {
        const index_t newest = one.shared_recent();
        return {one.sinks + newest, one.sinks, newest, one.shared_heavy() + 1};
      } else {
        const index_t kept = declared(one).min_budget() - 1, first = std::min(kept, index_t{4});
        return {kept, first, kept - first, 1};
      }
    });
  }
};

/// The policy as it is where heads share `slots` each on average and have `slack` in addition.
/// Refused: a policy without a score per slot, or for the same tokens (`alike`) one that does not
/// evict by its score alone (`unsupported`); fewer slots than it can share.
template <class P>
P for_shared(P p, index_t slots, index_t slack = 0, bool alike = false) {
  expects(errc::unsupported, declared(p).shares(), p.name(),
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

/// Adds the scores of a head's slots that may be shared out to the end of `scores`, in slot order:
/// neither sinks nor the latest tokens. `of_slots [length]`: the policy's `shared_scores`.
inline void add_shared_scores(const head_ref& head, std::span<const float> of_slots,
                              const shared_slots& shared, std::vector<float>& scores) {
  const index_t end = head.next_position() - shared.latest;
  for (index_t s = 0; s < head.length(); ++s) {
    const index_t at = head.position(s);
    if (at >= shared.sinks && at < end) {
      scores.push_back(of_slots[as_size(s)]);
    }
  }
}

/// Slots `[heads]` by one threshold over the scores of each head, `slots` a head on average and
/// `rest` (fewer than there are heads) in addition. No head gets more than the longest one holds,
/// `longest` slots, nor more than its own `most [heads]` (at least `slots`; empty: any), and what
/// it cannot take goes to the others. Where the longest is within `slots`, every head gets as many
/// as it asked for, `slots`.
inline std::vector<index_t> divide_slots(const std::vector<std::vector<float>>& scores,
                                         const shared_slots& shared, index_t slots, index_t longest,
                                         std::span<const index_t> most = {}, index_t rest = 0) {
  const auto heads = static_cast<index_t>(scores.size());
  if (longest <= slots) {
    return std::vector<index_t>(scores.size(), slots);
  }
  std::size_t widest = 1;
  for (const auto& s : scores) {
    widest = std::max(widest, s.size());
  }
  detail::reserved_vector<float> all;  // heads of fewer are filled up with what nothing is below
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
  const std::int64_t total = std::int64_t{heads} * mean + (mean < room ? rest : 0);
  auto more = global_budgets(all, static_cast<index_t>(total), own_most);
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
                                            std::span<const index_t> most = {}, index_t rest = 0) {
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
  for (const index_t n : divide_slots(layers, shared, slots, longest, of_layers, rest / kv_heads)) {
    of_heads.insert(of_heads.end(), as_size(kv_heads), n);
  }
  return of_heads;
}

/// The processes over which a model's heads are split: each has some KV heads of every layer, those
/// of rank 0 first. None: this one has all of them.
struct process_group {
  index_t rank = 0;  ///< of this process
  /// An all-gather: the messages of all processes in the order of their ranks, this one's `message`
  /// among them.
  std::function<std::vector<std::vector<float>>(std::span<const float> message)> gather = {};
};

namespace detail {

/// What heads share slots by, `[layers, kv_heads]`.
struct sharing_heads {
  std::vector<std::vector<float>> scores;  ///< [heads][slots]
  std::vector<index_t> lengths, most;      ///< [heads]

  void add(const sharing_heads& from, std::size_t h) {
    scores.push_back(from.scores[h]);
    lengths.push_back(from.lengths[h]), most.push_back(from.most[h]);
  }
};

/// The heads of all processes, layer by layer, for those of this one, which has `kv_heads` in each
/// layer: that becomes all. `own`: which of them are this process's. Refused: messages that are not
/// of as many layers.
inline sharing_heads all_heads(const sharing_heads& mine, const process_group& group,
                               index_t& kv_heads, std::vector<std::size_t>& own) {
  std::vector<float> message{static_cast<float>(kv_heads)};
  for (std::size_t h = 0; h < mine.scores.size(); ++h) {
    for (const auto n :
         {mine.lengths[h], mine.most[h], static_cast<index_t>(mine.scores[h].size())}) {
      message.push_back(static_cast<float>(n));  // exact: a head has fewer slots than 2^24
    }
    message.insert(message.end(), mine.scores[h].begin(), mine.scores[h].end());
  }
  const std::vector<std::vector<float>> messages = group.gather(message);
  expects(group.rank >= 0 && as_size(group.rank) < messages.size() &&
              messages[as_size(group.rank)].size() == message.size(),
          "end_prompt: expected this process's message (", message.size(), " numbers) at rank ",
          group.rank, " of those gathered, got ", messages.size(), " messages");
  const std::size_t layers = mine.scores.size() / as_size(kv_heads);
  std::vector<sharing_heads> of_rank;
  std::vector<std::size_t> each;  // [ranks] KV heads
  kv_heads = 0;
  for (const std::vector<float>& m : messages) {
    std::size_t next = 1;
    sharing_heads& heads = of_rank.emplace_back();
    const auto count = [&](std::size_t i) { return static_cast<index_t>(m[i]); };
    while (next + 3 <= m.size() && m[next + 2] >= 0 &&
           as_size(count(next + 2)) <= m.size() - next - 3) {
      heads.lengths.push_back(count(next)), heads.most.push_back(count(next + 1));
      const auto* const first = m.data() + next + 3;
      heads.scores.emplace_back(first, first + count(next + 2));
      next += 3 + heads.scores.back().size();
    }
    each.push_back(m.empty() || !(m[0] >= 0) ? 0 : as_size(count(0)));
    expects(each.back() > 0 && next == m.size() && heads.scores.size() == layers * each.back(),
            "end_prompt: expected messages of ", layers, " layers whose heads share slots, got ",
            heads.scores.size(), " heads of ", each.back(), " in a layer from rank ",
            of_rank.size() - 1);
    kv_heads += static_cast<index_t>(each.back());
  }
  sharing_heads all;
  for (std::size_t l = 0; l < layers; ++l) {
    for (std::size_t r = 0; r < of_rank.size(); ++r) {
      for (std::size_t h = 0; h < each[r]; ++h) {
        if (r == as_size(group.rank)) {
          own.push_back(all.scores.size());
        }
        all.add(of_rank[r], l * each[r] + h);
      }
    }
  }
  return all;
}

}  // namespace detail

/// How `divide_by_scores` divides.
struct slot_division {
  index_t slots;          ///< of a head on average
  index_t kv_heads;       ///< of a layer
  bool by_layer;          ///< equal slots for these
  process_group group{};  ///< ... and those of other processes
};

/// Slots for each of as many heads as `most` says by their scores. `most [heads]`: as of
/// `divide_slots`; `head(i)`: `head_ref`, `state(i)`: of as many slots.
template <class P>
std::vector<index_t> divide_by_scores(const P& p, const auto& head, const auto& state,
                                      std::span<const index_t> most, const slot_division& how) {
  const auto shared = shared_slots::of(p);
  detail::sharing_heads all{.scores = std::vector<std::vector<float>>(most.size()),
                            .lengths = {},
                            .most = {most.begin(), most.end()}};
  for (std::size_t i = 0; i < most.size(); ++i) {
    all.lengths.push_back(head(i).length());
  }
  std::vector<float> of_slots(as_size(std::ranges::max(all.lengths)));
  for (std::size_t i = 0; i < most.size(); ++i) {
    const auto own = std::span(of_slots).first(as_size(all.lengths[i]));
    declared(p).shared_scores(head(i), state(i), own);
    add_shared_scores(head(i), own, shared, all.scores[i]);
  }
  index_t kv_heads = how.kv_heads;
  std::vector<std::size_t> own;
  if (how.group.gather) {
    all = detail::all_heads(all, how.group, kv_heads, own);
  }
  const index_t longest = std::ranges::max(all.lengths);
  auto divided =
      how.by_layer && kv_heads > 1
          ? divide_by_layer(std::move(all.scores), kv_heads, shared, how.slots, longest, all.most)
          : divide_slots(all.scores, shared, how.slots, longest, all.most);
  for (std::size_t i = 0; i < own.size(); ++i) {
    divided[i] = divided[own[i]];
  }
  divided.resize(most.size());
  return divided;
}

}  // namespace kvmeld::inline v0
