// SPDX-License-Identifier: MIT
/// A prompt's cache, brought to the budget without a round trip to the host.
#pragma once

#include <type_traits>  // std::remove_const_t

#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/cuda/workspace.cuh"

namespace kvmeld::cuda {

/// After a prompt: measures every head on `queries` (none: as it is measured so far) and brings it
/// to its target: one for all, `{.slots = 205}`, or `head_budgets`. Equals `kvmeld::compress`.
/// Lengths and plans stay on the device; what is launched depends on the policy and the largest
/// target. Refused: budgets that do not fit, and modes without a CUDA path; a policy without a
/// `device_policy` does not compile.
template <class Policy, class Scalar, budgets Budgets = budget>
void compress(const Policy& policy, const cache_view<Scalar>& cache, const state_view& state,
              const query_rows<row_number<Scalar>>& queries, const Budgets& limits,
              workspace memory, stream stream) {
  check(cache), check(queries, 0, cache.group, "cuda compress");
  const auto rule = detail::rule_of(policy, cache);
  using device = device_policy<Policy>;
  using rule_type = std::remove_const_t<decltype(rule)>;
  if constexpr (rule_type::evicts) {
    expects(errc::unsupported, !remembers<rule_type> || queries.indptr == nullptr,
            "cuda compress: expected ", Policy::name(),
            " with an indptr in observe and lookahead alone, got one");
    detail::expect_valid(policy);
    detail::check_state(policy, rule, cache, state, "cuda compress");
    const head_budgets targets = head_budgets(limits).without_triggers();
    targets.check(cache.heads, "cuda compress", [&](const budget& x) {
      expects(x.slots >= policy.min_budget() && x.slots <= cache.capacity,
              "cuda compress: expected ", Policy::name(), " with a target of ", policy.min_budget(),
              " to ", cache.capacity, " slots, got ", x.slots);
    });
    workspace_allocator from(memory);
    const auto work = detail::allocate_prompt(
        from, rule,
        detail::shape_of(cache, detail::measured_queries(rule, queries.count),
                         targets.most_target(), queries.before));
    from.check("cuda compress");
    if constexpr (observes_prompts<rule_type>) {
      if (queries.count > 0) {
        device::observe(policy, rule, cache, state, queries, work, stream);
      }
    }
    if constexpr (requires {
                    device::plan_prompt(policy, rule, cache, state, queries, targets, work.plan,
                                        stream);
                  }) {
      if (queries.count > 0) {
        return device::plan_prompt(policy, rule, cache, state, queries, targets, work.plan, stream);
      }
    }
    device::plan(rule, cache, state, targets, work.plan, stream);
  }
}

}  // namespace kvmeld::cuda
