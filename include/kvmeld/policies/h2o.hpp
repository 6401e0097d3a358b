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
  float recent = 0.5F;  ///< share of the budget for the latest tokens
  index_t sinks = 4;    ///< first tokens that are never evicted (the paper: 0)
  group_combine combine = group_combine::sum;

  static constexpr std::string_view name() { return "h2o"; }
  static void parameters(auto& p, auto f) { f("recent", p.recent), f("sinks", p.sinks); }
  static constexpr std::array<slot_stat, 1> slot_stats() { return {}; }
  /// The smallest budget in which the sinks and the window's share both fit.
  index_t min_budget() const { return search::least_target(1, recent, sinks); }
  static constexpr observation_needs needs() { return {.probabilities = true}; }
  void validate() const {
    search::expect_share(name(), "recent", recent);
    search::expect_count(name(), "sinks", sinks, 0);
  }

  static constexpr bool shares = true;
  void shared_scores(const kv_head auto& head, const head_state& state,
                     std::span<float> out) const {
    score::write_shares(state.column(0), combine, head.group(),
                        static_cast<double>(state.observed()), out);
  }

  void observe(const kv_head auto&, head_state& state, const observation& observed) const {
    score::accumulate(state.column(0), observed.attention);
  }

  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    score::accumulate(state.column(0), head, queries, combine);
  }

  protection protects(const kv_head auto&, index_t target) const {
    return {.sinks = sinks, .recent = share_of(recent, target)};
  }
  float score(const kv_head auto&, const head_state& state, index_t slot) const {
    return state.column(0)[as_size(slot)];
  }
};

}  // namespace kvmeld::inline v0
