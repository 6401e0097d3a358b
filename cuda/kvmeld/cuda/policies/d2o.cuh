// SPDX-License-Identifier: MIT
/// d2o on the device.
#pragma once

#include "kvmeld/cuda/merge/remove_into_nearest.cuh"
#include "kvmeld/cuda/policies/d2o/rule.cuh"
#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/policies/d2o.hpp"

namespace kvmeld::cuda {

template <>
struct device_policy<d2o> : evicting_policy {
  static d2o_rule rule(const d2o& policy, const attention_spec&) {
    expects(!policy.counts, "cuda d2o: expected mass=0, got 1");
    expects(policy.weights == d2o::weighting::paper,
            "cuda d2o: expected the paper's weights, got the code's");
    return {{policy.combine, policy.sinks, policy.recent}, policy.beta};
  }
  /// Six launches.
  template <class Scalar>
  static void plan(const d2o_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                   const head_budgets& limits, const detail::plan_memory& work, stream stream) {
    detail::select_into(work.divided, rule, cache, state, limits, stream);
    detail::match_divided(cosine_similarity{}, cache, work, stream);
    detail::write_rows(cache, state, work.divided, work.plan, detail::join_above_mean{rule},
                       detail::absorb_weights{work.divided.similarity}, limits.most_target(),
                       stream);
    apply(work.plan, cache, state, stream);
  }
  template <class Scalar>
  static void remove_one(const d2o_rule& rule, const cache_view<Scalar>& cache,
                         const state_view& state, const head_budgets&,
                         const detail::step_memory<d2o_rule>& work, stream stream) {
    detail::remove_nearest(rule, cache, state, work.partial, stream);
  }
};

}  // namespace kvmeld::cuda
