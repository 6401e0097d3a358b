// SPDX-License-Identifier: MIT
/// fold's plan of a prompt, launch by launch.
#pragma once

#include "kvmeld/cuda/policies/fold/cluster_slots.cuh"
#include "kvmeld/cuda/policies/fold/gain.cuh"
#include "kvmeld/cuda/policies/fold/plans.cuh"
#include "kvmeld/cuda/policies/fold/values.cuh"

namespace kvmeld::cuda::detail {

/// Clusters of all slots but the pinned, fitted on the reference queries. Eleven launches, twelve
/// by scores, one more each with slots that are evicted and with a gain, and those of
/// `cluster_slots`, `fit_masses` and `fit_values`.
template <class Scalar>
void fold_clusters(const fold_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                   const query_rows<Scalar>& reference, const head_budgets& limits,
                   const fold_plan_memory& work, stream stream) {
  const auto heads = cache.blocks();
  const keep_evict_partition& d = work.divided;
  const fold_scratch& own = work.fold;
  const prompt_scratch& more = work.prompt;
  const prompt_options& options = rule.prompt;

  // Slots that keep their bytes.
  const scored_pins scored =
      pin_by_scores(rule, cache, state, limits, false, d.nearest.into, own.more, stream);
  leverage_of_keys(cache, state, rule, limits, false, scored.more, d.rows, own.leverage, stream);
  launch(pool_leverage<Scalar>{cache, d, options.pool, options.outlier, own.leverage.leverage,
                               more.least},
         {heads}, stream);
  select_into(d, pin_rule{rule, own.leverage.leverage, more.least, false, scored}, cache, state,
              limits, stream);

  if (rule.evicts_scored()) {
    launch(evict_scored<Scalar>{cache, state, d, limits, rule.evicted, scored.more, own.evicted},
           {heads}, stream);
  }

  // The mass of slots, and clusters.
  const chosen_rows<Scalar> queries{reference, reference.data, reference.count, d.rows};
  column_scores(cache, queries, {}, {.total = own.sum}, own.measure, stream);
  using weigh = weigh_slots<Scalar, chosen_rows<Scalar>>;
  launch(weigh{cache, queries, own.sum, own.mass},
         {heads, blocks_of(cache.capacity, weigh::threads)}, stream);
  cluster_slots(rule, cache, queries, limits, work, stream);
  launch(make_rows<Scalar, join_all>{cache, state, d, work.plan, {}}, {heads}, stream);
  fit_masses(cache, work.plan, d.into, queries, own.sum, own.mass, own.measure.log_sum_exp,
             more.values, stream);
  if (rule.gains()) {
    launch(raise_pins<Scalar>{cache, work.plan, rule, scored.more, more.values}, {heads}, stream);
  }
  plan_view plan = work.plan;
  if (options.ridge > 0) {
    fit_values(rule, cache, work.plan, queries, own.measure.log_sum_exp, more.values, stream);
    plan.value_correction = more.values.correction;
  }
  apply(plan, cache, state, stream);
}

}  // namespace kvmeld::cuda::detail
