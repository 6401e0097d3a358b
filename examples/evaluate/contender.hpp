// SPDX-License-Identifier: MIT
/// What is compared: a policy at a budget, and how that is divided between layers and heads.
#pragma once

#include <cstddef>  // std::size_t
#include <memory>   // std::shared_ptr
#include <span>
#include <vector>

#include "evaluate/policies.hpp"

namespace evaluate {

using kvmeld::budget;

/// One of the policies that measured the prompts, at a budget.
struct contender {
  std::size_t index = 0;  ///< among the policies of `measure`
  any_policy policy;
  budget limit;  ///< most slots between steps, of all heads on average
  budget_allocation budgets = budget_allocation::uniform;
  std::vector<char> whole = {};  ///< [full layers · KV heads] those that keep all
  index_t room = 0;              ///< slots beside the budget for what comes after a prompt
  kvmeld::storage_pair storage = kvmeld::storage::f32;  ///< of slots, once compressed
  /// How slots were divided on other prompts, in place of a threshold over the model.
  std::shared_ptr<const kvmeld::budget_profile> profile = nullptr;
  /// [full layers · KV heads] where they are not alike; empty: all are `policy`.
  std::vector<any_policy> of_heads = {};

  /// The policy of a head, as of all below the `i`-th of `[full layers · KV heads]`.
  const any_policy& of_head(std::size_t i) const { return of_heads.empty() ? policy : of_heads[i]; }
  /// Is it what all others are compared with? A full cache in another storage is compared too.
  bool is_reference() const {
    return !kvmeld::declared(policy).evicts() && storage == kvmeld::storage::f32;
  }
  bool keeps_all(std::size_t i) const { return !whole.empty() && whole[i] != 0; }
  /// Can it decode from an empty cache? Slots that heads share are divided at a prompt's end, by a
  /// profile, or where decode scores them; until then each head has as many as any other. Other
  /// divisions need a prompt.
  bool streams() const {
    return kvmeld::declared(policy).supports_decode() &&
           (budgets == budget_allocation::uniform || is_shared(budgets));
  }
};

/// How many of `heads` can keep all `tokens` (DuoAttention, Xiao et al. 2024: those that retrieve),
/// so that with `slots` a head on average each other one still has a quarter of them, and what
/// `least` asks for.
index_t whole_heads(index_t heads, index_t slots, index_t tokens, index_t least);

/// The heads of a cache's full layers, in their order.
std::vector<index_t> full_heads(const kvmeld::cache& kv);

/// Slots of every head after the prompt that `kv` holds, `[full layers · KV heads]`, by what it was
/// measured as, likewise. They sum to the contender's slots times the heads (duo_attention: less
/// than a slot a head below it, so that those that share are alike); every head has what the policy
/// protects, and the division is of the rest.
std::vector<index_t> allocate_slots(const contender& c, kvmeld::cache& kv,
                                    std::span<const kvmeld::head_state> measured);

/// Slots of so many heads for a stream of at most `tokens`, before its first: by the contender's
/// profile, or as many for each.
std::vector<index_t> allocate_slots(const contender& c, index_t tokens, index_t heads);

/// What one threshold over the model, as of `kvmeld::budget::shared`, or its profile gives each of
/// its heads in addition to what all have, `[full layers · KV heads]`.
std::vector<index_t> shared_budgets(const contender& c, kvmeld::cache& kv,
                                    std::span<const kvmeld::head_state> measured);

}  // namespace evaluate
