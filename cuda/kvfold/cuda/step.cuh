/// Decode attention that observes as it goes, and the whole decode step.
#pragma once

#include <type_traits>  // std::remove_const_t

#include "kvfold/cuda/merge/plans.cuh"
#include "kvfold/cuda/policies/ems/step.cuh"
#include "kvfold/cuda/score/observe.cuh"
#include "kvfold/cuda/search/nearest_step.cuh"

namespace kvfold::cuda {

namespace detail {

/// Does more than one slot leave at once, now and then?
inline bool plans(const budget& budget) { return budget.trigger_length() != budget.target + 1; }

template <class Scalar, class Rule>
void attend_observe_leave(const Rule& rule, const cache_view<Scalar>& cache,
                          const state_view& state, const Scalar* queries,
                          const new_tokens<Scalar>& fresh, const step_options& options,
                          partial_attention partial, Scalar* out, float* log_sum_exp,
                          stream stream) {
  expects(queries != nullptr && out != nullptr, "cuda attend: queries and out [", cache.heads, ", ",
          cache.group, ", ", cache.dim, "] expected, null came");
  partial.logits = Rule::observes ? partial.logits : nullptr;
  if constexpr (shares_entries<Rule>) {
    attend_splits(entry_masses{state, rule.places(cache.capacity)}, cache, queries, fresh, partial,
                  stream);
  } else {
    attend_splits(log_masses{}, cache, queries, fresh, partial, stream);
  }
  launch(observe_and_leave<Scalar, Rule>{cache, state, partial, rule, options, queries, out,
                                         log_sum_exp, cache.aligned()},
         {static_cast<unsigned>(cache.heads), static_cast<unsigned>(partial.tiles)}, stream);
}

}  // namespace detail

/// Softmax attention with log-mass of one query for every query head, and in the same pass every
/// slot's probability into the policy's score:
///
///     ℓ_s = scale · q·k_s + log_mass_s      p = softmax(ℓ)      out = Σ_s p_s v_s
///
/// `queries`, `out` `[heads, group, dim]`; `log_sum_exp` `[heads, group]` or null. K and V are read
/// once; the logits, 4 · group bytes a slot, are written and read again. Two launches. An empty
/// head's output is 0.
template <class Scalar, class Rule>
void attend_observe(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                    const Scalar* queries, Scalar* out, float* log_sum_exp, workspace memory,
                    stream stream) {
  check(cache), check(state);
  workspace_allocator from(memory);
  const auto work =
      detail::allocate_step(from, cache.heads, cache.capacity, cache.group, cache.dim, false, {});
  from.check("cuda attend");
  detail::attend_observe_leave(rule, cache, state, queries, {}, {}, work.partial, out, log_sum_exp,
                               stream);
}

/// Attention alone.
template <class Scalar>
void attend(const cache_view<Scalar>& cache, const Scalar* queries, Scalar* out, float* log_sum_exp,
            workspace memory, stream stream) {
  attend_observe(no_rule{}, cache, state_view{}, queries, out, log_sum_exp, memory, stream);
}

/// One decode step of all heads: append `fresh`, attend, observe, and back to the budget. Equals
/// `kvfold::step`. Lengths stay on the device, and so does whether anything leaves.
///
///     trigger = target + 1   two launches: of a head with one slot more than `budget.target` one
///                            leaves, and the newcomer takes its place
///     ... d2o, keepkv        three: the nearest of all keys is looked for
///     ... ems                four: all tokens say who leaves, and all entries whereto
///     later, and kvmerger    two, and those of a plan for the heads that have reached the trigger
///
/// A head that has no room for its newcomer gives NaN and stays as it is. Refused: budgets that do
/// not fit, policies and modes without a CUDA path.
template <class Policy, class Scalar>
void step(const Policy& policy, const cache_view<Scalar>& cache, const state_view& state,
          const Scalar* queries, const new_tokens<Scalar>& fresh, const budget& budget, Scalar* out,
          workspace memory, stream stream) {
  check(cache), check(state);
  expects(fresh.keys != nullptr && fresh.values != nullptr, "cuda step: keys and values [",
          cache.heads, ", ", cache.dim, "] of the newcomers expected, null came");
  expects(budget.target > 0 && budget.target < cache.capacity, "cuda step: a target of 1 to ",
          cache.capacity - 1, " expected (room for the newcomer), ", budget.target, " came");
  expects(budget.trigger_length() > budget.target && budget.trigger_length() <= cache.capacity,
          "cuda step: a trigger of ", budget.target + 1, " to ", cache.capacity, " expected, ",
          budget.trigger, " came");
  const auto rule = rule_of(policy, budget, cache.dim);
  detail::expect_memory(policy, cache, state);
  using rule_type = std::remove_const_t<decltype(rule)>;
  if constexpr (rule_type::leaves) {
    policy.validate();
    expects(budget.target >= policy.min_budget(), "cuda step: ", Policy::name(),
            " with a target of at least ", policy.min_budget(), " expected, ", budget.target,
            " came");
  }
  bool plans = rule_type::leaves && (detail::plans(budget) || always_plans<rule_type>);
  if constexpr (shares_entries<rule_type>) {
    plans = plans || rule.takes_plans();
  }
  workspace_allocator from(memory);
  const auto work = detail::allocate_step(from, cache.heads, cache.capacity, cache.group, cache.dim,
                                          plans, detail::plan_needs::of(rule));
  from.check("cuda step");
  detail::attend_observe_leave(rule, cache, state, queries, fresh,
                               {true, plans ? 0 : budget.target}, work.partial, out, nullptr,
                               stream);
  if constexpr (seeks_nearest<rule_type>) {
    if (!plans) {
      launch(detail::leave_for_nearest<Scalar, rule_type>{cache, state, work.partial, rule,
                                                          cache.aligned()},
             {static_cast<unsigned>(cache.heads), static_cast<unsigned>(work.partial.near_tiles)},
             stream);
    }
  }
  if constexpr (shares_entries<rule_type>) {
    if (!plans) {
      detail::leave_entry(rule, cache, state, budget, work, stream);
    }
  }
  if constexpr (rule_type::leaves) {
    if (plans) {
      detail::plan_and_apply(rule, cache, state, {budget.target, budget.trigger_length()},
                             work.plan, stream);
    }
  }
}

}  // namespace kvfold::cuda
