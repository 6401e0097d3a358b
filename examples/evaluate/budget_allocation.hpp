// SPDX-License-Identifier: MIT
/// How a budget is divided between layers and heads: the word behind `+` in `snapkv+ada_kv`.
#pragma once

#include <array>
#include <span>
#include <string_view>
#include <utility>  // std::pair
#include <vector>

#include "evaluate/contender.hpp"

namespace evaluate {

inline constexpr std::array budget_allocations = {
    std::pair{std::string_view("equal"), budget_allocation::uniform},
    std::pair{std::string_view("pyramid_kv"), budget_allocation::pyramid_kv},
    std::pair{std::string_view("pyramid_infer"), budget_allocation::pyramid_infer},
    std::pair{std::string_view("d2o"), budget_allocation::d2o},
    std::pair{std::string_view("ada_kv"), budget_allocation::ada_kv},
    std::pair{std::string_view("duo_attention"), budget_allocation::duo_attention},
    std::pair{std::string_view("global"), budget_allocation::global},
    std::pair{std::string_view("profile"), budget_allocation::profile}};

/// Does it go by what a column of the policy's has measured?
inline bool by_scores(budget_allocation d) {
  return d == budget_allocation::d2o || d == budget_allocation::ada_kv || is_shared(d);
}

/// How many of `heads` can keep all `tokens` (DuoAttention, Xiao et al. 2024: those that retrieve),
/// so that with `slots` a head on average each other one still has a quarter of them, and what
/// `least` asks for.
index_t whole_heads(index_t heads, index_t slots, index_t tokens, index_t least);

/// Slots of every head after a prompt of `tokens`, `[layers · KV heads]`, by what the prompt was
/// measured as, likewise. They sum to the contender's slots times the heads (duo_attention: less
/// than a slot a head below it, so that those that share are alike); every head has what the policy
/// protects, and the division is of the rest.
std::vector<index_t> allocate_slots(const contender& c, index_t tokens,
                                    std::span<const kvmeld::head_state> measured, index_t layers);

/// Slots of so many heads for a stream of at most `tokens`, before its first: the contender's own
/// for all, or by its profile.
std::vector<index_t> allocate_slots(const contender& c, index_t tokens, index_t heads);

/// What one threshold over the model (or its profile) gives each of its heads beside what all have,
/// `[layers · KV heads]`.
std::vector<index_t> shared_budgets(const contender& c, index_t tokens,
                                    std::span<const kvmeld::head_state> measured);

}  // namespace evaluate
