// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::fill
#include <utility>    // std::pair

#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"

namespace kvmeld::inline v0 {

/// Scissorhands (arXiv 2305.17118, algorithm 2): how often a token got less than its fair share.
///   score   low marks: queries that see n slots and give this one less than 1/n, in the mean over
///           the group; over the last `history` to 2 · `history` queries, as past + current window
///           (the paper: exactly the last `history`)
///   select  sinks (the paper: 0) and the last W, then those with the fewest low marks, the earlier
///           token on ties
///   match   none: the others are evicted
/// The paper drops half the cache at once; here that is the budget's trigger.
struct scissorhands {
  index_t sinks = 4;
  index_t window = 10;
  index_t history = 400;
  static constexpr group_combine combine = group_combine::mean;  ///< of a group's attention

  static constexpr std::string_view name() { return "scissorhands"; }
  static constexpr std::tuple options{
      option("sinks", &scissorhands::sinks, 0, any_count,
             "first tokens, never evicted (the paper: 0)"),
      option("window", &scissorhands::window, 0, any_count, "latest tokens, never evicted"),
      option("history", &scissorhands::history, 1, any_count, "queries whose marks count")};
  static constexpr column past{0, "past"}, current{1, "current"};
  static constexpr std::array columns{past, current};
  static constexpr std::size_t memory(index_t, index_t, index_t) { return 1; }  // queries so far
  static constexpr observation_needs needs() { return {.probabilities = true}; }
  kvmeld::prompt_use prompt_use() const {
    return {.observes = true, .reach = history - 1, .latest = history};
  }

  static constexpr bool shares() { return true; }
  void shared_scores(const kv_head auto& head, const head_state& state,
                     std::span<float> out) const {
    // The share of queries that gave a token its fair share of attention, or more.
    const double queries =
        std::max(score::queries_in_window(state, history, state.memory()[0]), 1.0);
    for (index_t s = 0; s < head.length(); ++s) {
      out[as_size(s)] = static_cast<float>(1 + score(head, state, s).first / queries);
    }
  }

  void observe(const kv_head auto& head, head_state& state, const observation& observed) const {
    const index_t at = head.next_position() - 1;
    mark(head, observed.attention, at, visible_slots(head, at), state.column(current));
    score::count_in_window(state.memory()[0], history, state.column(current), state.column(past));
  }
  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    const auto before = state.column(past), now = state.column(current);
    std::fill(before.begin(), before.end(), 0.0F);
    std::fill(now.begin(), now.end(), state.memory()[0] = 0);
    score::for_each_query(head, queries.reference(history), combine,
                          [&](auto attention, index_t at, index_t visible) {
                            mark(head, attention, at, visible, before);
                          });
  }

  protection protects(const kv_head auto&, index_t) const {
    return {.sinks = sinks, .recent = window};
  }
  /// Ties are the rule here, and slots change places in decode: positions decide them.
  std::pair<float, index_t> score(const kv_head auto& head, const head_state& state,
                                  index_t slot) const {
    const auto s = as_size(slot);
    return {rank(-(state.column(past)[s] + state.column(current)[s])), -head.position(slot)};
  }

 private:
  static void mark(const kv_head auto& head, std::span<const float> attention, index_t at,
                   index_t visible, std::span<float> marks) {
    const float fair = 1.0F / static_cast<float>(visible);
    for (std::size_t s = 0; s < attention.size(); ++s) {
      const bool low = head.sees(static_cast<index_t>(s), at) && attention[s] < fair;
      marks[s] += low ? 1.0F : 0.0F;
    }
  }
};

}  // namespace kvmeld::inline v0
