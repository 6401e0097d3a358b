// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::clamp

#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"

namespace kvmeld::inline v0 {

/// RoCo (arXiv 2402.06262): robust cache omission.
///   score   mean of Σ_g a_gj over the queries that could see slot j, and its standard deviation
///   select  sinks, the last W, then `steady · B − W` by deviation (the authors' code counts the
///           window in), then the top of the rest by mean
///   match   none: the others are evicted
/// Mean and variance run along (Welford), so that they stay exact enough in float.
struct roco {
  index_t sinks = 4;
  index_t window = 10;
  float steady = 0.3F;

  static constexpr std::string_view name() { return "roco"; }
  static constexpr attention_support supports() { return {}; }
  static constexpr std::tuple options{
      option("sinks", &roco::sinks, 0, any_count, "first tokens, never evicted (the paper: 0)"),
      option("window", &roco::window, 0, any_count, "latest tokens, never evicted"),
      option("steady", &roco::steady, 0, 1,
             "share of the budget held for their deviation, the window included")};
  static constexpr column mean{0, "mean"}, squares{1, "squares"},  // Σ (a − mean)²
      queries_seen{2, "queries_seen"};
  static constexpr std::array columns{mean, squares, queries_seen};
  protection protects(const kv_head auto&, index_t) const {
    return {.sinks = sinks, .recent = window};
  }
  static constexpr observation_needs needs() { return {.probabilities = true}; }

  static constexpr bool shares() { return true; }
  void shared_scores(const kv_head auto& head, const head_state& state,
                     std::span<float> out) const {
    score::write_shares(state.column(mean), group_combine::sum, head.group(), 1, out);
  }

  void observe(const kv_head auto& head, head_state& state, const observation& observed) const {
    count(head, state, observed.attention, head.next_position() - 1);
  }
  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    score::for_each_query(
        head, queries, group_combine::sum,
        [&](auto attention, index_t at, index_t) { count(head, state, attention, at); });
  }

  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    const auto is_protected = protected_slots(head, sinks, window);
    const auto [alone, varied] = held_back(head, target);
    search::select(head.length(), alone + varied, is_protected, variances(state), work);
    work.row_of.assign(work.marks.begin(), work.marks.end());
    const auto chosen = [&](index_t s) { return work.row_of[s] != 0; };
    evict(head, target, chosen, search::column_score(state.column(mean)), work, out);
  }

 private:
  struct reserved {
    index_t alone;   ///< slots that are never evicted
    index_t varied;  ///< slots held for their deviation
  };
  reserved held_back(const kv_head auto& head, index_t target) const {
    const auto is_protected = protected_slots(head, sinks, window);
    index_t alone = 0;
    for (index_t s = 0; s < head.length(); ++s) {
      alone += is_protected(s) ? 1 : 0;
    }
    const index_t room = std::max(target - alone, index_t{0});
    return {alone, std::clamp(share_of(steady, target) - window, index_t{0}, room)};
  }
  /// Variances: they rank as deviations do.
  struct variance_of {
    std::span<const float> squared, seen;

    float operator()(index_t s) const {
      const auto i = as_size(s);
      return seen[i] > 0 ? rank(squared[i] / seen[i]) : 0.0F;
    }
  };
  static variance_of variances(const head_state& state) {
    return {state.column(squares), state.column(queries_seen)};
  }

  static void count(const kv_head auto& head, head_state& state, std::span<const float> attention,
                    index_t at) {
    float* const m = state.column(mean).data();
    float* const m2 = state.column(squares).data();
    float* const n = state.column(queries_seen).data();
    const index_t first = head.spec().first_seen(at);
    for (std::size_t s = 0; s < attention.size(); ++s) {  // without branches: at a vector's width
      const index_t position = head.position(static_cast<index_t>(s));
      const bool sees = position <= at && position >= first;
      const float off = attention[s] - m[s], count = n[s] + 1, now = m[s] + off / count;
      const float square = m2[s] + off * (attention[s] - now);
      n[s] = sees ? count : n[s];
      m2[s] = sees ? square : m2[s];
      m[s] = sees ? now : m[s];
    }
  }
};

}  // namespace kvmeld::inline v0
