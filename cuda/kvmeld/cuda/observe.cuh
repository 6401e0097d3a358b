// SPDX-License-Identifier: MIT
/// A prompt's attention, measured before anything is compressed.
#pragma once

#include <type_traits>  // std::remove_const_t

#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/cuda/workspace.cuh"

namespace kvmeld::cuda {

/// Measures every head on the queries of a chunk of a prompt, whose tokens were appended, and
/// compresses nothing. Equals `kvmeld::observe`. `compress` without queries ends such a prompt.
/// Memory: `observe_workspace_bytes`. Refused: no queries, and modes
/// without a CUDA path.
template <class Policy, class Scalar>
void observe(const Policy& policy, const cache_view<Scalar>& cache, const state_view& state,
             const query_rows<row_number<Scalar>>& queries, workspace memory, stream stream) {
  check(cache), check(queries, 1, cache.group, "cuda observe");
  const auto rule = detail::rule_of(policy, cache);
  using device = device_policy<Policy>;
  using rule_type = std::remove_const_t<decltype(rule)>;
  if constexpr (rule_type::evicts) {
    detail::expect_valid(policy);
    detail::check_state(policy, rule, cache, state, "cuda observe");
  }
  if constexpr (rule_type::evicts && observes_prompts<rule_type>) {
    workspace_allocator from(memory);
    const auto work = detail::allocate_prompt(
        from, rule,
        detail::shape_of(cache, detail::measured_queries(rule, queries.count), 0, queries.before));
    from.check("cuda observe", "observe_workspace_bytes");
    device::observe(policy, rule, cache, state, queries, work, stream);
  }
}

}  // namespace kvmeld::cuda
