// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::copy

#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"

namespace kvmeld::inline v0 {

/// TOVA, token omission via attention (arXiv 2401.06104).
///   score   s_j = Σ_g a_gj of the latest query alone (or the reference queries given)
///   select  sinks (the paper: 0), then the top of the rest by s
///   match   none: the others are evicted
struct tova {
  index_t sinks = 4;
  group_combine combine = group_combine::sum;

  static constexpr std::string_view name() { return "tova"; }
  static constexpr std::tuple options{
      option("sinks", &tova::sinks, 0, any_count, "first tokens, never evicted (the paper: 0)"),
      option(&tova::combine)};
  static constexpr column attention{0, "attention"};
  static constexpr std::array columns{attention};
  static constexpr observation_needs needs() { return {.probabilities = true}; }
  static constexpr kvmeld::prompt_use prompt_use() { return {.observes = true, .latest = 1}; }
  static constexpr kvmeld::decode_use decode_use() { return {.steps = 1}; }

  static constexpr bool shares() { return true; }
  void shared_scores(const kv_head auto& head, const head_state& state,
                     std::span<float> out) const {
    score::write_shares(state.column(attention), combine, head.group(), 1, out);
  }

  void observe(const kv_head auto&, head_state& state, const observation& observed) const {
    std::copy(observed.attention.begin(), observed.attention.end(),
              state.column(attention).begin());
  }
  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    column_scores(head, queries.reference(1), {.combine = combine},
                  {.total = state.column(attention)});
  }

  index_t min_budget() const { return sinks + 1; }
  protection protects(const kv_head auto&, index_t) const { return {.sinks = sinks}; }
  float score(const kv_head auto&, const head_state& state, index_t slot) const {
    return state.column(attention)[as_size(slot)];
  }
};

}  // namespace kvmeld::inline v0
