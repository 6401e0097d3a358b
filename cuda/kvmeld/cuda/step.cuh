// SPDX-License-Identifier: MIT
/// The decode step.
#pragma once

#include <type_traits>  // std::remove_const_t

#include "kvmeld/cuda/attend.cuh"
#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/cuda/workspace.cuh"

namespace kvmeld::cuda {

/// One decode step of all heads: append `fresh`, attend, observe, and back to the budget: one for
/// all, `{.slots = 205}`, or `head_budgets`. Equals `kvmeld::step`. Lengths stay on the device,
/// and so does whether a slot is removed.
///
///     trigger = target + 1   two launches: a head with one slot more than its target loses one,
///                            and the new token takes its place
///     ... d2o, keepkv        one more, which finds the nearest of all keys, for heads whose
///                            evicted slot was not predicted (`state_view::predicted`)
///     ... ems                one more, which finds the centre among all entries
///     later of any head,     two, and those of a plan for the heads that have reached the trigger,
///     and kvmerger           unless the budgets say that none has (`head_budgets::with_none_due`)
///
/// The first two are one where a block attends a whole head: many heads of few slots, in 16 bits.
///
/// A head that has no room for its new token gives NaN and stays as it is. Refused: budgets that do
/// not fit, policies and modes without a CUDA path.
template <class Policy, class Scalar, budgets Budgets = budget>
void step(const Policy& policy, const cache_view<Scalar>& cache, const state_view& state,
          const Scalar* queries, const new_tokens<Scalar>& fresh, const Budgets& limits,
          Scalar* out, workspace memory, stream stream) {
  check(cache);
  expects(fresh.keys != nullptr && fresh.values != nullptr, "cuda step: expected keys and values [",
          cache.heads, ", ", cache.dim, "] of the new tokens, got null");
  const auto rule = detail::rule_of(policy, cache);
  detail::check_state(policy, rule, cache, state, "cuda step");
  using device = device_policy<Policy>;
  using rule_type = std::remove_const_t<decltype(rule)>;
  if constexpr (rule_type::evicts) {
    policy.validate();
  }
  const head_budgets checked = limits;
  checked.check(cache.heads, "cuda step", [&](const budget& x) {
    expects(x.slots > 0 && x.slots < cache.capacity, "cuda step: expected a target of 1 to ",
            cache.capacity - 1, " slots (one fewer than the capacity), got ", x.slots);
    expects(x.trigger_length() > x.slots && x.trigger_length() <= cache.capacity,
            "cuda step: expected a trigger of ", x.slots + 1, " to ", cache.capacity,
            " slots, got ", x.trigger);
    if constexpr (rule_type::evicts) {
      expects(x.slots >= policy.min_budget(), "cuda step: expected ", Policy::name(),
              " with a target of at least ", policy.min_budget(), " slots, got ", x.slots);
    }
  });
  bool plans = rule_type::evicts && (!checked.one_by_one() || always_plans<rule_type>);
  if constexpr (requires { rule.takes_plans(); }) {
    plans = plans || rule.takes_plans();
  }
  workspace_allocator from(memory);
  const auto work = detail::allocate_step(from, rule, detail::shape_of(cache), plans);
  from.check("cuda step");
  detail::attend_and_observe(detail::in_memory(rule, work), cache, state, queries, fresh,
                             {true, !plans, checked}, work.partial, out, nullptr, stream);
  if constexpr (rule_type::evicts) {
    if (plans && checked.none_due()) {
      return;
    }
    if (plans) {
      device::plan(rule, cache, state, checked, work.plan, stream);
    } else if constexpr (requires {
                           device::remove_one(rule, cache, state, checked, work, stream);
                         }) {
      device::remove_one(rule, cache, state, checked, work, stream);
    }
  }
}

}  // namespace kvmeld::cuda
