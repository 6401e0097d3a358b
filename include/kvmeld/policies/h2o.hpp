// SPDX-License-Identifier: MIT
#pragma once

#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"

namespace kvmeld::inline v0 {

/// H2O, the Heavy-Hitter Oracle (Zhang et al. 2023, arXiv 2306.14048).
///   score   s_j ← s_j + Σ_g a_gj     attention over all queries so far, section 4.1
///   select  sinks, the most recent, then the top of the rest by s
///   match   none: the others are evicted
struct h2o {
  float recent = 0.5F;
  index_t sinks = 4;
  group_combine combine = group_combine::sum;

  static constexpr std::string_view name() { return "h2o"; }
  static constexpr std::tuple options{
      option("recent", &h2o::recent, 0, below_1, "share of the budget for the latest tokens"),
      option("sinks", &h2o::sinks, 0, any_count, "first tokens, never evicted (the paper: 0)"),
      option(&h2o::combine)};
  static constexpr column attention{0, "attention"};
  static constexpr std::array columns{attention};
  /// The smallest budget in which the sinks and the window's share both fit.
  index_t min_budget() const { return search::least_target(1, recent, sinks); }
  static constexpr observation_needs needs() { return {.probabilities = true}; }

  static constexpr bool shares() { return true; }
  void shared_scores(const kv_head auto& head, const head_state& state,
                     std::span<float> out) const {
    score::write_shares(state.column(attention), combine, head.group(),
                        static_cast<double>(state.observed()), out);
  }

  void observe(const kv_head auto&, head_state& state, const observation& observed) const {
    score::accumulate(state.column(attention), observed.attention);
  }

  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    score::accumulate(state.column(attention), head, queries, combine);
  }

  protection protects(const kv_head auto&, index_t target) const {
    return {.sinks = sinks, .recent = share_of(recent, target)};
  }
  float score(const kv_head auto&, const head_state& state, index_t slot) const {
    return state.column(attention)[as_size(slot)];
  }
};

}  // namespace kvmeld::inline v0
