// SPDX-License-Identifier: MIT
/// fold's plans, launch by launch.
#pragma once

#include "kvmeld/cuda/merge/apply.cuh"
#include "kvmeld/cuda/merge/rows.cuh"
#include "kvmeld/cuda/policies/fold/memory.cuh"
#include "kvmeld/cuda/policies/fold/pairs.cuh"
#include "kvmeld/cuda/policies/fold/pins.cuh"
#include "kvmeld/cuda/search/match.cuh"
#include "kvmeld/cuda/search/select.cuh"

namespace kvmeld::cuda::detail {

/// Decode, on the queries remembered: the cheapest pairs of every head that reaches its
/// budget are merged, to its target. Sixteen launches, seventeen by scores.
template <class Scalar>
void fold_pairs(const fold_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                const head_budgets& limits, const fold_plan_memory& work, stream stream) {
  const auto heads = cache.blocks(), group = blocks_of(cache.group);
  const keep_evict_partition& d = work.divided;
  const fold_scratch& own = work.fold;
  const scored_pins scored =
      pin_by_scores(rule, cache, state, limits, true, d.nearest.into, own.more, stream);
  leverage_of_keys(cache, state, rule, limits, true, scored.more, d.rows, own.leverage, stream);
  select_into(d, pin_rule{rule, own.leverage.leverage, nullptr, true, scored}, cache, state, limits,
              stream);

  const foreseen_rows queries{own.foreseen, rule.queries, cache.group,        pitch_of(cache.dim),
                              d.rows,       state.memory, state.memory_stride};
  launch(foresee<Scalar>{cache, state, rule, queries, own.foreseen}, {heads, group}, stream);
  cache_view<Scalar> one_head = cache;
  one_head.group = 1;
  column_scores(one_head, foreseen_line(queries), {}, {.total = own.sum}, own.measure, stream);
  using weigh = weigh_slots<Scalar, foreseen_rows>;
  launch(weigh{cache, queries, own.sum, own.mass},
         {heads, blocks_of(cache.capacity, weigh::threads)}, stream);

  norms(cache, d.removed_list(), d.similarity, stream);
  match_by(ward_similarity{own.mass, true}, cache, d.removed_list(), d.removed_list(), d.similarity,
           d.nearest, stream);
  launch(choose_cheapest<Scalar>{cache, d, limits}, {heads}, stream);
  match_by(ward_similarity{own.mass}, cache, d.removed_list(), d.kept_list(), d.similarity,
           d.nearest, stream);
  launch(make_rows<Scalar, join_all>{cache, state, d, work.plan, {}}, {heads}, stream);
  launch(fit_rows<Scalar, foreseen_rows>{cache, work.plan, d.into, queries, own.sum, own.mass,
                                         own.measure.log_sum_exp},
         {heads, blocks_of(limits.most_target(), 64)}, stream);
  apply(work.plan, cache, state, stream);
}

}  // namespace kvmeld::cuda::detail
