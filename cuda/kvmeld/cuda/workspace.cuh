// SPDX-License-Identifier: MIT
/// Device memory that calls work in, and how much they need.
#pragma once

#include "kvmeld/cuda/memory/work_memory.cuh"
#include "kvmeld/cuda/policies/device_policy.cuh"

namespace kvmeld::cuda {

/// Bytes of workspace for `attend` and `attend_observe`.
template <class Scalar>
std::size_t workspace_bytes(const cache_view<Scalar>& cache) {
  workspace_allocator count;
  detail::allocate_step(count, no_rule{}, detail::shape_of(cache), false);
  return count.used();
}

/// Bytes of workspace for `observe` with `queries` queries a query head, of heads that the call
/// runs. `before`: as in `query_rows`, if the policy is fold by scores, which turns these too.
template <class Policy, class Scalar>
std::size_t observe_workspace_bytes(const Policy& policy, const cache_view<Scalar>& cache,
                                    index_t queries, index_t before = 0) {
  const auto rule = detail::rule_of(policy, cache);
  workspace_allocator count;
  detail::allocate_prompt(
      count, rule, detail::shape_of(cache, detail::measured_queries(rule, queries), 0, before));
  return count.used();
}

/// Bytes of workspace for `compress` with `queries` queries a query head, for `observe` with as
/// many, and for `step`: the largest. One workspace may serve all, on one stream. `target`: the
/// largest of `compress`; 0: any. Of fold it takes much more. `before`: as of `observe`.
template <class Policy, class Scalar>
std::size_t workspace_bytes(const Policy& policy, const cache_view<Scalar>& cache,
                            index_t queries = 0, index_t target = 0, index_t before = 0) {
  const auto rule = detail::rule_of(policy, cache);
  workspace_allocator prompt;
  detail::allocate_prompt(prompt, rule,
                          detail::shape_of(cache, detail::measured_queries(rule, queries),
                                           target > 0 ? target : cache.capacity, before));
  for (const bool plans : {false, static_cast<bool>(rule.evicts)}) {
    workspace_allocator decode;
    detail::allocate_step(decode, rule, detail::shape_of(cache), plans);
    prompt.reserve(decode.used());
  }
  return prompt.used();
}

}  // namespace kvmeld::cuda
