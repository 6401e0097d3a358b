// SPDX-License-Identifier: MIT
/// What will be run, before anything is: every policy at every budget, and which of them are
/// refused.
#pragma once

#include <memory>  // std::shared_ptr
#include <string>
#include <vector>

#include "engine/config.hpp"
#include "engine/matrix.hpp"
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
  std::string given = "1.0";  ///< the budget, as it was
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
  std::vector<group> groups = {};
  std::vector<std::string> notes = {};
  /// What contenders refer to; null: nothing.
  std::shared_ptr<const engine::row_major_matrix> calibration = nullptr;
  index_t prompts = 1, streams = 0, longest_stream = 0, most_slots = 1;
  index_t behind = decoded_tokens;  ///< tokens of the text that are wanted after a prompt

  /// Heads that keep all, for budget_allocations that need them: KV heads in the order
  /// `by_retrieval` `[full layers · KV heads]`, after a prompt of `tokens`.
  void set_whole_heads(const std::vector<index_t>& order, index_t tokens);
};

/// Entries of all groups of a plan, in order.
template <class Plan>
auto entries_of(Plan& p) {
  std::vector<decltype(p.groups.front().entries.data())> all;
  for (auto& g : p.groups) {
    for (auto& e : g.entries) {
      all.push_back(&e);
    }
  }
  return all;
}

namespace detail {

/// The policy as it holds `slots` a head, and `room` more, of prompts that are longer; where it
/// cannot, why.
std::pair<any_policy, std::string> holding(const named_policy& n, index_t slots, index_t room,
                                           index_t dim);
/// Why `p` cannot hold a head of `slots`, of `dim` numbers a row; empty when it can.
std::string refusal_of(const any_policy& p, const kvmeld::storage_pair& type, index_t slots,
                       index_t dim);

}  // namespace detail

/// For a text of so many tokens.
plan make_plan(const options& o, index_t text_tokens, const engine::config& shape);

}  // namespace evaluate
