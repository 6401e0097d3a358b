/// A prompt's cache, brought to the budget without a round trip to the host.
#pragma once

#include <cmath>    // std::pow
#include <cstddef>  // std::size_t
#include <string_view>
#include <type_traits>  // std::remove_const_t

#include "kvfold/cuda/policies/fold/clusters.cuh"
#include "kvfold/cuda/policies/keepkv/estimates.cuh"
#include "kvfold/cuda/policies/snapkv/pool_sums.cuh"
#include "kvfold/cuda/score/add_sums.cuh"
#include "kvfold/cuda/score/column_scores.cuh"
#include "kvfold/cuda/step.cuh"

namespace kvfold::cuda {

namespace detail {

/// The queries' attention into the policy's columns.
template <class Rule, class Policy, class Scalar>
void observe_prompt(const Policy& policy, const cache_view<Scalar>& cache, const state_view& state,
                    const query_rows<Scalar>& queries, const prompt_memory<Rule>& work,
                    stream stream) {
  constexpr std::string_view name = Policy::name();
  const auto heads = static_cast<unsigned>(cache.heads);
  if constexpr (name == "snapkv") {
    const auto rule = rule_of(policy, budget{});
    column_scores(cache, queries.reference(policy.window), {.combine = policy.combine},
                  {.total = work.sums}, work.log_sums, stream);
    launch(pool_sums<Scalar>{cache, state, rule, policy.kernel, policy.count_border, work.sums,
                             work.order, work.spare},
           {heads}, stream);
  } else if constexpr (name == "ems") {
    const auto rule = rule_of(policy, budget{}, cache.dim);
    if (cache.dim <= 128) {
      observe_tokens<Scalar, 128>(rule, cache, state, queries, work, stream);
    } else {
      observe_tokens<Scalar, 256>(rule, cache, state, queries, work, stream);
    }
  } else if constexpr (name == "keepkv") {
    const auto rule = rule_of(policy, budget{});
    if (cache.dim <= 128) {
      estimate<Scalar, 128>(rule, cache, state, queries.reference(policy.window), stream);
    } else {
      estimate<Scalar, 256>(rule, cache, state, queries.reference(policy.window), stream);
    }
  } else {
    constexpr bool latest_alone = name == "tova";
    const auto counted = latest_alone ? queries.reference(1) : queries;
    float decay = 1;
    if constexpr (requires { policy.decay; }) {
      decay = policy.decay;
    }
    column_scores(
        cache, counted, {.decay = decay, .combine = policy.combine},
        {.total = decay == 1 ? work.sums : nullptr, .decayed = decay == 1 ? nullptr : work.sums},
        work.log_sums, stream);
    const auto age =
        latest_alone ? 0.0F : static_cast<float>(std::pow(double{decay}, queries.count));
    using kernel = add_sums<Scalar>;
    const index_t stretches = (cache.capacity + kernel::threads - 1) / kernel::threads;
    launch(kernel{cache, state, work.sums, age}, {heads, static_cast<unsigned>(stretches)}, stream);
  }
}

}  // namespace detail

/// After a prompt: measures every head on `queries` (none: as it is measured so far) and brings it
/// to `budget.target` slots. Equals `kvfold::compress`. Lengths and plans stay on the device; what
/// is launched depends on the policy alone. Refused: budgets that do not fit, policies and modes
/// without a CUDA path.
template <class Policy, class Scalar>
void compress(const Policy& policy, const cache_view<Scalar>& cache, const state_view& state,
              const query_rows<Scalar>& queries, const budget& budget, workspace memory,
              stream stream) {
  check(cache), check(state);
  const auto rule = rule_of(policy, budget, cache.dim);
  using rule_type = std::remove_const_t<decltype(rule)>;
  if constexpr (rule_type::evicts) {
    policy.validate();
    detail::expect_memory(policy, cache, state);
    expects(budget.target >= policy.min_budget() && budget.target <= cache.capacity,
            "cuda compress: ", Policy::name(), " with a target of ", policy.min_budget(), " to ",
            cache.capacity, " expected, ", budget.target, " came");
    workspace_allocator from(memory);
    const auto work =
        detail::allocate_prompt(from, rule, detail::shape_of(cache, queries.count, budget.target));
    from.check("cuda compress");
    if constexpr (Policy::name() == "fold") {
      if (queries.count > 0) {
        expects(policy.prompt.polish == 0, "cuda fold: no polish expected, ", policy.prompt.polish,
                " steps came");
        return detail::fold_clusters(rule, cache, state, queries, budget, work.plan, stream);
      }
    }
    if constexpr (rule_type::observes) {
      if (queries.count > 0) {
        detail::observe_prompt<rule_type>(policy, cache, state, queries, work, stream);
      }
    }
    if constexpr (Policy::name() == "keepkv") {
      if (policy.merge_first && queries.count > 0) {
        return detail::merge_first(rule, cache, state, budget.target, work.plan, stream);
      }
    }
    if constexpr (shares_entries<rule_type>) {
      return detail::merge_entries(rule, cache, state, {.target = budget.target}, queries.count > 0,
                                   work.plan, stream);
    } else {
      detail::plan_and_apply(rule, cache, state, {.target = budget.target}, work.plan, stream);
    }
  }
}

}  // namespace kvfold::cuda
