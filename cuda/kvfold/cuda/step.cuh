/// The decode step.
#pragma once

#include <type_traits>  // std::remove_const_t

#include "kvfold/cuda/attend.cuh"
#include "kvfold/cuda/policies/device_policy.cuh"
#include "kvfold/cuda/workspace.cuh"

namespace kvfold::cuda {

namespace detail {

/// Is more than one slot removed at once, now and then?
inline bool plans(const budget& budget) { return budget.trigger_length() != budget.target + 1; }

}  // namespace detail

/// One decode step of all heads: append `fresh`, attend, observe, and back to the budget. Equals
/// `kvfold::step`. Lengths stay on the device, and so does whether a slot is removed.
///
///     trigger = target + 1   two launches: a head with one slot more than `budget.target` loses
///                            one, and the new token takes its place
///     ... d2o, keepkv        three: the nearest of all keys
///     ... ems                four: all tokens are weighed, and all entries compared
///     later, and kvmerger    two, and those of a plan for the heads that have reached the trigger
///
/// A head that has no room for its new token gives NaN and stays as it is. Refused: budgets that do
/// not fit, policies and modes without a CUDA path.
template <class Policy, class Scalar>
void step(const Policy& policy, const cache_view<Scalar>& cache, const state_view& state,
          const Scalar* queries, const new_tokens<Scalar>& fresh, const budget& budget, Scalar* out,
          workspace memory, stream stream) {
  check(cache);
  expects(fresh.keys != nullptr && fresh.values != nullptr, "cuda step: keys and values [",
          cache.heads, ", ", cache.dim, "] of the new tokens expected, null came");
  expects(budget.target > 0 && budget.target < cache.capacity, "cuda step: a target of 1 to ",
          cache.capacity - 1, " expected (room for the new token), ", budget.target, " came");
  expects(budget.trigger_length() > budget.target && budget.trigger_length() <= cache.capacity,
          "cuda step: a trigger of ", budget.target + 1, " to ", cache.capacity, " expected, ",
          budget.trigger, " came");
  const auto rule = detail::rule_of(policy, budget, cache.dim);
  detail::check_state(policy, rule, cache, state, "cuda step");
  using device = device_policy<Policy>;
  using rule_type = std::remove_const_t<decltype(rule)>;
  if constexpr (rule_type::evicts) {
    policy.validate();
    expects(budget.target >= policy.min_budget(), "cuda step: ", Policy::name(),
            " with a target of at least ", policy.min_budget(), " expected, ", budget.target,
            " came");
  }
  bool plans = rule_type::evicts && (detail::plans(budget) || always_plans<rule_type>);
  if constexpr (requires { rule.takes_plans(); }) {
    plans = plans || rule.takes_plans();
  }
  workspace_allocator from(memory);
  const auto work = detail::allocate_step(from, rule, detail::shape_of(cache), plans);
  from.check("cuda step");
  detail::attend_and_observe(rule, cache, state, queries, fresh, {true, plans ? 0 : budget.target},
                             work.partial, out, nullptr, stream);
  if constexpr (rule_type::evicts) {
    if (plans) {
      device::plan(rule, cache, state, {budget.target, budget.trigger_length()}, work.plan, stream);
    } else if constexpr (requires {
                           device::remove_one(rule, cache, state, budget, work, stream);
                         }) {
      device::remove_one(rule, cache, state, budget, work, stream);
    }
  }
}

}  // namespace kvfold::cuda
