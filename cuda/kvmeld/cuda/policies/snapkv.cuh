// SPDX-License-Identifier: MIT
/// snapkv on the device.
#pragma once

#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/cuda/policies/snapkv/pool_sums.cuh"
#include "kvmeld/policies/snapkv.hpp"

namespace kvmeld::cuda {

template <>
struct device_policy<snapkv> : evicting_policy {
  static window_rule rule(const snapkv& policy, const attention_spec&) {
    return {policy.combine, policy.sinks, policy.window};
  }
  template <class Scalar>
  static void observe(const snapkv& policy, const window_rule& rule,
                      const cache_view<Scalar>& cache, const state_view& state,
                      const query_rows<Scalar>& queries,
                      const detail::prompt_memory<window_rule>& work, stream stream) {
    detail::column_scores(cache, queries.reference(policy.window), {.combine = rule.combine},
                          {.total = work.sums}, work.measure, stream);
    launch(detail::pool_sums<Scalar>{cache, state, rule, policy.kernel, policy.count_border,
                                     work.sums, work.order, work.spare},
           {cache.blocks()}, stream);
  }
};

}  // namespace kvmeld::cuda
