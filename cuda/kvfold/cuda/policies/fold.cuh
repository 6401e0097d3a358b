/// fold on the device.
#pragma once

#include "kvfold/cuda/policies/device_policy.cuh"
#include "kvfold/cuda/policies/fold/clusters.cuh"
#include "kvfold/cuda/policies/fold/plans.cuh"
#include "kvfold/policies/fold.hpp"

namespace kvfold::cuda {

template <>
struct device_policy<fold> {
  /// Refused: pins by scores.
  static fold_rule rule(const fold& policy, index_t dim) {
    const auto& decode = policy.decode;
    const auto& p = policy.prompt;
    expects(errc::unsupported, policy.pins == fold::pin_rule::leverage,
            "cuda fold: pins by leverage expected, by scores came");
    return {group_combine::sum,
            policy.sinks,
            policy.recent,
            policy.recent_share,
            policy.share,
            policy.leverage_ridge,
            decode.queries,
            decode.stride,
            decode.period,
            decode.ahead.horizon,
            double{decode.ahead.fade},
            {p.pool, p.outlier, p.rounds, p.floor, p.ridge},
            rope_params_of(policy.rope, dim)};
  }
  /// What a prompt that is observed and not compressed leaves.
  template <class Scalar>
  static void remember(const fold_rule& rule, const cache_view<Scalar>& cache,
                       const state_view& state, const query_rows<Scalar>& queries, stream stream) {
    detail::remember_queries(rule, cache, state, queries, stream);
  }
  template <class Scalar>
  static void plan(const fold_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                   const head_budgets& limits, const detail::fold_plan_memory& work,
                   stream stream) {
    detail::fold_pairs(rule, cache, state, limits, work, stream);
  }
  /// Refused: a polish.
  template <class Scalar>
  static void plan_prompt(const fold& policy, const fold_rule& rule,
                          const cache_view<Scalar>& cache, const state_view& state,
                          const query_rows<Scalar>& queries, const head_budgets& limits,
                          const detail::fold_plan_memory& work, stream stream) {
    expects(policy.prompt.polish == 0, "cuda fold: no polish expected, ", policy.prompt.polish,
            " steps came");
    detail::fold_clusters(rule, cache, state, queries, limits, work, stream);
  }
};

}  // namespace kvfold::cuda
