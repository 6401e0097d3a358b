// SPDX-License-Identifier: MIT
/// What will be run, before anything is: every policy at every budget, and which of them are
/// refused.
#pragma once

#include <string>
#include <vector>

#include "engine/config.hpp"
#include "evaluate/contender.hpp"
#include "evaluate/options.hpp"

namespace evaluate {

inline constexpr index_t decoded_tokens = 256;
/// A stream is this many times as long as the budget.
inline constexpr index_t stream_budgets = 10;

/// One row to be: a policy at a budget; or why not.
struct entry {
  contender chosen;
  std::string name;
  std::string given = "1";    ///< the budget, as it was
  index_t stream_tokens = 0;  ///< 0: no stream
  std::string refusal = {};
};

/// Rows that are compared with one another.
struct group {
  std::string title;
  std::vector<entry> entries = {};
};

struct plan {
  std::vector<named_policy> policies;  ///< those asked for, and full_cache
  contender full;
  std::vector<group> groups;
  std::vector<std::string> notes;
  index_t prompts = 1, streams = 0, longest_stream = 0, most_slots = 1;
  index_t behind = decoded_tokens;  ///< tokens of the text that are wanted behind a prompt

  /// `f` on every policy: those that measure and those that compress.
  template <class F>
  void for_each_policy(F f) {
    for (named_policy& p : policies) {
      f(p.policy);
    }
    for (group& g : groups) {
      for (entry& e : g.entries) {
        f(e.chosen.policy);
      }
    }
  }
  /// Heads that keep all, for budget_allocations that need them: KV heads in the order
  /// `by_retrieval` `[layers · KV heads]`, after a prompt of `tokens`.
  void set_whole_heads(const std::vector<index_t>& order, index_t tokens);
  /// What asks the model to read a prompt again.
  void set_replay_words(const replay_words& words) {
    for (named_policy& p : policies) {
      p.words = words;
    }
  }
};

namespace detail {

/// The most slots of a head that take `share` of the bytes of a full head of `prompt` tokens in
/// floats, the policy's state included; 0: not one does.
index_t slots_within(const any_policy& p, storage type, double share, index_t prompt, index_t dim,
                     index_t group);

/// Why `p` cannot hold a head of `slots`, of `dim` numbers a row; empty when it can.
std::string refusal_of(const any_policy& p, storage type, index_t slots, index_t dim);

}  // namespace detail

/// For a text of so many tokens.
plan make_plan(const options& o, index_t text_tokens, const engine::config& shape);

}  // namespace evaluate
