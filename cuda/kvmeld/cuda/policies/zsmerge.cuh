// SPDX-License-Identifier: MIT
/// zsmerge on the device.
#pragma once

#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/cuda/policies/zsmerge/residual.cuh"
#include "kvmeld/policies/zsmerge.hpp"

namespace kvmeld::cuda {

template <>
struct device_policy<zsmerge> {
  static zsmerge_rule rule(const zsmerge& policy, const attention_spec&) {
    return {policy.combine,
            policy.sinks,
            policy.proximity,
            policy.residual,
            policy.decay,
            policy.alpha,
            policy.new_token_competes,
            policy.prompt == decltype(policy.prompt)::chunked};
  }
  template <class Scalar>
  static void observe(const zsmerge& policy, const zsmerge_rule& rule,
                      const cache_view<Scalar>& cache, const state_view& state,
                      const query_rows<row_number<Scalar>>& queries,
                      const detail::prompt_memory<zsmerge_rule>& work, stream stream) {
    detail::add_column_sums(cache, state, queries, {.decay = policy.decay, .combine = rule.combine},
                            policy.decay, work.sums, work.measure, stream);
  }
  /// Six launches; of narrow rows seven.
  template <class Scalar>
  static void plan(const zsmerge_rule& rule, const cache_view<Scalar>& cache,
                   const state_view& state, const head_budgets& limits,
                   const detail::plan_memory& work, stream stream) {
    detail::select_into(work.divided, rule, cache, state, limits,
                        detail::place_residuals<Scalar>{cache, state, rule, limits, work.divided},
                        stream);
    detail::match_divided(dot_similarity{}, cache, work, stream);
    detail::write_rows(cache, state, work.divided, work.plan, detail::join_all{},
                       detail::residual_weights{rule.alpha}, limits.most_target(), stream);
    if constexpr (narrow_rows<Scalar>) {
      launch(detail::merge_means<Scalar>{cache, state, rule, work.plan, cache.aligned()},
             {cache.blocks()}, stream);
      detail::apply_merged(work.plan, cache, state, stream);
    } else {
      apply(work.plan, cache, state, stream);
    }
    launch(detail::fix_residuals<Scalar>{cache, state, rule, limits}, {cache.blocks()}, stream);
  }
};

}  // namespace kvmeld::cuda
