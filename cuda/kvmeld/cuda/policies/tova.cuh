// SPDX-License-Identifier: MIT
/// tova on the device.
#pragma once

#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/cuda/policies/evicting_rules.cuh"
#include "kvmeld/policies/tova.hpp"

namespace kvmeld::cuda {

template <>
struct device_policy<tova> : evicting_policy {
  static sum_rule rule(const tova& policy, const attention_spec&) {
    return {policy.combine, policy.sinks, 0, 0.0F};
  }
  /// The latest query alone.
  template <class Scalar>
  static void observe(const tova&, const sum_rule& rule, const cache_view<Scalar>& cache,
                      const state_view& state, const query_rows<row_number<Scalar>>& queries,
                      const detail::prompt_memory<sum_rule>& work, stream stream) {
    detail::add_column_sums(cache, state, queries.reference(1), {.combine = rule.combine}, 0.0F,
                            work.sums, work.measure, stream);
  }
};

}  // namespace kvmeld::cuda
