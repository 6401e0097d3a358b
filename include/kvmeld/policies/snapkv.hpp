// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::fill

#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"

namespace kvmeld::inline v0 {

/// SnapKV (Li et al. 2024, arXiv 2404.14469): what the prompt's last queries attend to.
///   score   prompt: attention summed over the last W queries (or the reference queries given),
///           average-pooled over positions (listing 1); decode: over the last W to 2W queries, as
///           past + current window
///   select  sinks and the last W tokens, then the top of the rest by s
///   match   none: the others are evicted
/// The paper compresses prompts only; decoding on as H2O restricted to the window is ours.
struct snapkv {
  index_t window = 32;
  index_t sinks = 4;
  index_t kernel = 7;
  bool count_border = false;
  group_combine combine = group_combine::sum;

  static constexpr std::string_view name() { return "snapkv"; }
  static constexpr std::tuple options{
      option("window", &snapkv::window, 1, any_count,
             "latest queries that count, whose tokens stay"),
      option("sinks", &snapkv::sinks, 0, any_count, "first tokens, never evicted (the paper: 0)"),
      option("kernel", &snapkv::kernel, 1, any_count,
             "slots that a score is the mean over, an odd number"),
      option("count_border", &snapkv::count_border,
             "do means at the borders divide by `kernel` too, as the authors do?"),
      option(&snapkv::combine)};
  static constexpr column past{0, "past"}, current{1, "current"};
  static constexpr std::array columns{past, current};
  static constexpr std::size_t memory(index_t, index_t, index_t) {
    return 1;
  }  // queries in `current`
  static constexpr observation_needs needs() { return {.probabilities = true}; }
  kvmeld::prompt_use prompt_use() const {
    return {.observes = true, .reach = window - 1, .latest = window};
  }
  kvmeld::decode_use decode_use() const { return {.steps = window}; }
  void validate() const {
    expects(kernel % 2 == 1, "snapkv: expected an odd kernel, got ", kernel);
  }

  static constexpr bool shares() { return true; }
  void shared_scores(const kv_head auto& head, const head_state& state,
                     std::span<float> out) const {
    for (index_t s = 0; s < head.length(); ++s) {
      out[as_size(s)] = score(head, state, s);
    }
    const double queries = score::queries_in_window(state, window, state.memory()[0]);
    score::write_shares(out, combine, head.group(), queries, out);
  }

  void observe(const kv_head auto&, head_state& state, const observation& observed) const {
    score::accumulate(state.column(current), observed.attention);
    score::count_in_window(state.memory()[0], window, state.column(current), state.column(past));
  }

  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    const auto s = state.column(past), now = state.column(current);
    column_scores(head, queries.reference(window), {.combine = combine}, {.total = s});
    const auto in_window = search::protect(head, 0, window);
    score::average_pool(
        head, [&](index_t j) { return !in_window(head.position(j)); }, kernel, count_border, s);
    std::fill(now.begin(), now.end(), state.memory()[0] = 0);
  }

  index_t min_budget() const { return sinks + window + 1; }
  protection protects(const kv_head auto&, index_t) const {
    return {.sinks = sinks, .recent = window};
  }
  float score(const kv_head auto&, const head_state& state, index_t slot) const {
    const auto s = as_size(slot);
    return state.column(past)[s] + state.column(current)[s];
  }
};

}  // namespace kvmeld::inline v0
