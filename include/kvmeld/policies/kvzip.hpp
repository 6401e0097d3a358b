// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::max
#include <vector>

#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"

namespace kvmeld::inline v0 {

/// KVzip (Kim et al. 2025, arXiv 2505.23416): what the model looks up when it repeats the prompt.
///   score   the largest attention that any query of the second reading gives a slot, of all query
///           heads of the group
///   select  sinks and the latest, then the top by s; the paper: by one threshold over all heads of
///           all layers, which is `global_budgets` of column 0
///   match   none: the others are evicted
/// Prompt only. The second reading is the engine's: it appends "Repeat the previous context" and
/// the prompt, as a whole or in chunks, after the prompt's cache, and observes the queries of what
/// it has appended, which see the prompt and their own part; then it takes the slots away again
/// (`head.restore`, `head_state::truncate`). Without one the prompt's own queries are what counts.
/// The authors' code takes chunks of 2048 tokens, and normalises over the sinks, the chunk of the
/// prompt and its repetition; here over all that a query sees, the same for prompts of one chunk.
struct kvzip {
  index_t sinks = 4;   ///< first tokens that are never evicted (the authors: the system prompt)
  index_t recent = 0;  ///< latest tokens that are never evicted (the paper: 0)

  static constexpr std::string_view name() { return "kvzip"; }
  static void parameters(auto& p, auto f) { f("sinks", p.sinks), f("recent", p.recent); }
  static constexpr bool supports_decode = false;
  static constexpr group_combine combine = group_combine::max;
  static constexpr std::array<slot_stat, 1> slot_stats() {
    return {slot_stat{slot_reduce::max, 0}};
  }
  static constexpr observation_needs needs() { return {.probabilities = true}; }
  void validate() const {
    search::expect_count(name(), "sinks", sinks, 0);
    search::expect_count(name(), "recent tokens", recent, 0);
  }

  void observe(const kv_head auto&, head_state& state, const observation& observed) const {
    raise(state.column(0), observed.attention);
  }
  template <class T>
  void observe(const kv_head auto& head, head_state& state, const query_view<T>& queries) const {
    std::vector<float> largest(as_size(head.length()));
    column_scores(head, queries, {}, {.largest = largest});
    raise(state.column(0), largest);
  }

  protection protects(const kv_head auto&, index_t) const {
    return {.sinks = sinks, .recent = recent};
  }
  float score(const kv_head auto&, const head_state& state, index_t slot) const {
    return state.column(0)[as_size(slot)];
  }

 private:
  static void raise(std::span<float> score, std::span<const float> to) {
    for (std::size_t j = 0; j < to.size(); ++j) {
      score[j] = std::max(score[j], to[j]);
    }
  }
};

}  // namespace kvmeld::inline v0
