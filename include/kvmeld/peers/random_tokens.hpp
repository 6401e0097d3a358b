// SPDX-License-Identifier: MIT
#pragma once

#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/policies/policy.hpp"

namespace kvmeld::inline v0 {

/// Random tokens: the floor. A method that does not beat it is not worth its cost.
///   score   none: chance, the same for the same seed and position
///   select  sinks and the last W tokens, then a uniform sample of the rest; `prompt`: of prompts'
///           tokens first (the baseline of decode benchmarks, arXiv 2609.03430 and 2606.03928)
///   match   none: the others are evicted
struct random_tokens {
  index_t sinks = 4;
  index_t window = 32;
  std::uint64_t seed = 0;
  bool prompt = false;

  static constexpr std::string_view name() { return "random"; }
  static constexpr std::tuple options{
      option("sinks", &random_tokens::sinks, 0, any_count, "first tokens, never evicted"),
      option("window", &random_tokens::window, 0, any_count, "latest tokens, never evicted"),
      option("seed", &random_tokens::seed, 0, any_seed, "of the chance"),
      option("prompt", &random_tokens::prompt,
             "do the tokens of prompts stay before all decoded ones?")};
  /// How many tokens had been appended when the latest prompt ended.
  std::size_t memory(index_t, index_t, index_t) const { return prompt ? 1 : 0; }
  kvmeld::prompt_use prompt_use() const { return {.observes = prompt, .latest = 1}; }

  /// Of a prompt's queries, only where they end.
  void observe(const kv_head auto& head, head_state& state, const query_view<float>&) const {
    if (prompt) {
      state.memory()[0] = static_cast<float>(head.next_position());
    }
  }

  protection protects(const kv_head auto&, index_t) const {
    return {.sinks = sinks, .recent = window};
  }
  double score(const kv_head auto& head, const head_state& state, index_t slot) const {
    const index_t at = head.position(slot);
    const double chance{detail::unit_random(seed, at)};
    return prompt && static_cast<float>(at) < state.memory()[0] ? 1 + chance : chance;
  }
};

}  // namespace kvmeld::inline v0
