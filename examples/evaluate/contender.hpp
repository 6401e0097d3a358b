// SPDX-License-Identifier: MIT
/// What is compared: a policy at a budget.
#pragma once

#include <cstddef>  // std::size_t
#include <memory>   // std::shared_ptr
#include <vector>

#include "evaluate/policies.hpp"
#include "kvmeld/compress/global_budgets.hpp"

namespace evaluate {

using kvmeld::budget;

/// One of the policies that measured the prompts, at a budget.
struct contender {
  std::size_t index = 0;  ///< among the policies of `measure`
  any_policy policy;
  budget limit;  ///< most slots between steps, of all heads on average
  budget_allocation budgets = budget_allocation::uniform;
  std::vector<char> whole = {};  ///< [layers · KV heads] those that keep all
  index_t room = 0;              ///< slots beside the budget for what comes behind a prompt
  evaluate::storage storage = evaluate::storage::f32;  ///< of slots, once compressed
  /// How slots were divided on other prompts, in place of a threshold over the model.
  std::shared_ptr<const kvmeld::budget_profile> profile = nullptr;
  /// [layers · KV heads] where they are not alike; empty: all are `policy`.
  std::vector<any_policy> of_heads = {};

  /// The policy of a head, as of all below the `i`-th of `[layers · KV heads]`.
  const any_policy& of_head(std::size_t i) const { return of_heads.empty() ? policy : of_heads[i]; }
  /// Is it what all others are compared with? A full cache in another storage is compared too.
  bool is_reference() const { return !policy.evicts() && storage == evaluate::storage::f32; }
  bool keeps_all(std::size_t i) const { return !whole.empty() && whole[i] != 0; }
  /// Can it decode from an empty cache? A division needs a prompt to go by, or a profile of others.
  bool streams() const {
    return policy.supports_decode() &&
           (budgets == budget_allocation::uniform || budgets == budget_allocation::profile);
  }
};

}  // namespace evaluate
