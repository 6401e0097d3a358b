// SPDX-License-Identifier: MIT
/// fold on the device.
#pragma once

#include "kvmeld/cuda/memory/wide_rows.cuh"
#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/cuda/policies/fold/plans.cuh"
#include "kvmeld/policies/fold.hpp"

namespace kvmeld::cuda {

template <>
struct device_policy<fold> {
  /// Refused: scores in decode, a rotation of part of a head.
  static fold_rule rule(const fold& policy, const attention_spec& spec) {
    const auto& decode = policy.decode;
    const auto& p = policy.prompt;
    expects(errc::unsupported, !policy.rescores(), "cuda fold: expected rescore=0, got ",
            decode.rescore);
    return {group_combine::sum,
            policy.pinned(),
            policy.pins == fold::pin_rule::scores,
            prompt_score_options{}.horizon,
            policy.leverage_ridge,
            decode.queries,
            decode.stride,
            decode.period,
            decode.ahead.horizon,
            double{decode.ahead.fade},
            {p.pool, p.outlier, p.rounds, p.floor, p.ridge},
            rope_params_of(spec.rope, spec.key_dim)};
  }
  /// Of a prompt: by scores, what its queries will look up; and which of them are remembered.
  template <class Scalar>
  static void observe(const fold&, const fold_rule& rule, const cache_view<Scalar>& cache,
                      const state_view& state, const query_rows<row_number<Scalar>>& queries,
                      const detail::prompt_memory<fold_rule>& work, stream stream) {
    const auto all = queries.reference(queries.count + queries.before);
    if (rule.by_scores && queries.position == nullptr) {
      const auto rows = detail::wide_rows(cache, budget{.slots = 0}, work.plan.wide, stream);
      detail::score_prompt(rule, rows, state, all, work.plan.scores, stream);
    }
    launch(detail::remember_reference<Scalar>{cache, state, rule, all}, {cache.blocks()}, stream);
  }
  template <class Scalar>
  static void plan(const fold_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                   const head_budgets& limits, const detail::fold_plan_memory& work,
                   stream stream) {
    const auto rows = detail::wide_rows(cache, limits, work.wide, stream);
    detail::fold_pairs(rule, rows, state, limits, work, stream);
    apply(work.plan, cache, state, stream);
  }
  template <class Scalar>
  static void plan_prompt(const fold&, const fold_rule& rule, const cache_view<Scalar>& cache,
                          const state_view& state, const query_rows<row_number<Scalar>>& queries,
                          const head_budgets& limits, const detail::fold_plan_memory& work,
                          stream stream) {
    const auto rows = detail::wide_rows(cache, limits, work.wide, stream);
    apply(detail::fold_clusters(rule, rows, state, queries, limits, work, stream), cache, state,
          stream);
  }
};

}  // namespace kvmeld::cuda
