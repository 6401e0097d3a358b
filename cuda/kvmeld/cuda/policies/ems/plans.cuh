// SPDX-License-Identifier: MIT
/// EMS's plans, launch by launch.
#pragma once

#include "kvmeld/cuda/device/one_after_other.cuh"
#include "kvmeld/cuda/memory/work_memory.cuh"
#include "kvmeld/cuda/merge/weigh_rows.cuh"
#include "kvmeld/cuda/policies/ems/match.cuh"
#include "kvmeld/cuda/policies/ems/scores.cuh"
#include "kvmeld/cuda/policies/ems/update_table.cuh"
#include "kvmeld/cuda/score/column_scores.cuh"

namespace kvmeld::cuda::detail {

template <class Scalar>
void measure_slots(const ems_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                   const head_budgets& limits, const entry_scratch& to, stream stream) {
  using measure = measure_entries<Scalar>;
  launch(measure{cache, state, rule, limits, to.key_length, to.value_length, to.turned, to.pitch,
                 cache.aligned()},
         {cache.blocks(), blocks_of(cache.capacity, measure::slots)}, stream);
}

/// A prompt's attention into the tokens' scores: three launches beside `column_scores`, whose sums
/// are those of heads whose tokens all stand alone. Of other heads they are made in vain, and the
/// log-sum-exp once more: which these are stays on the device.
template <class Scalar>
void observe_tokens(const ems_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                    const query_rows<Scalar>& queries, const prompt_memory<ems_rule>& work,
                    stream stream) {
  const auto heads = cache.blocks();
  measure_slots(rule, cache, state, {}, {}, stream);
  // The window of a short last chunk reaches back to queries that were counted before.
  const query_rows<Scalar> local = queries.reference(rule.window);
  const query_rows<Scalar>& reach = local.count > queries.count ? local : queries;
  const credited_queries counts{queries.count, local.count};
  const index_t places = rule.places(cache.stride());
  float* const log_sum_exp = work.measure.log_sum_exp;
  const bool aligned = cache.aligned() && reach.aligned();
  const bool back = counts.late > counts.all;  // then the sum over all of `reach` is the window's
  column_scores(cache, reach, {.window = back ? counts.all : counts.late, .combine = rule.combine},
                {.total = back ? work.last : work.sums, .window = back ? work.sums : work.last},
                work.measure, stream);
  with_depth<128, 256>(cache.dim, [&](auto depth) {
    using log_sums =
        query_log_sums<Scalar, decltype(depth)::value, query_rows<Scalar>, entry_masses>;
    launch(log_sums{cache, reach, log_sum_exp, aligned, {state, places}},
           {heads, blocks_of(cache.group), blocks_of(reach.count, log_sums::shape::rows)}, stream);
  });
  using credit = credit_tokens<Scalar>;
  launch(credit{cache, state, reach, rule.combine, places, counts, work.sums, work.last,
                log_sum_exp, aligned},
         {heads, blocks_of(cache.capacity, credit::slots)}, stream);
}

/// The centre of every removed entry, into `d.nearest`.
template <class Scalar>
void match_entries(const ems_rule& rule, const cache_view<Scalar>& cache, const entry_scratch& own,
                   const keep_evict_partition& d, stream stream) {
  const auto match = [&]<class Row>(const plane<Row>& keys, const plane<Row>& values) {
    with_depth<128, 256>(cache.dim, [&](auto depth) {
      using kernel = redundant_tiles<Scalar, decltype(depth)::value, Row>;
      launch(kernel{cache, keys, values, own, d, keys.aligned() && values.aligned()},
             {cache.blocks(), blocks_of(cache.capacity, kernel::rows)}, stream);
    });
  };
  if (rule.with_position) {
    return match(cache.keys, cache.values);
  }
  const std::ptrdiff_t row = 2 * own.pitch, head = cache.capacity * row;
  match(plane<float>{own.turned, head, row}, plane<float>{own.turned + own.pitch, head, row});
}

/// A plan that brings every head that reaches its budget to its target, and the table's part of it
/// carried out; `prompt`: as after one. Six launches.
template <class Scalar>
void merge_entries(const ems_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                   const head_budgets& limits, bool prompt, const ems_plan_memory& work,
                   stream stream) {
  const extent heads{cache.blocks()};
  const keep_evict_partition& d = work.divided;
  const entry_scratch& own = work.entries;
  measure_slots(rule, cache, state, limits, own, stream);
  launch(
      one_after_other<weigh_entries<Scalar>, divide_entries<Scalar>>{
          {cache, state, rule, limits, own, prompt}, {cache, state, rule, limits, own, d, prompt}},
      heads, stream);
  match_entries(rule, cache, own, d, stream);
  write_rows(cache, state, d, work.plan,
             join_above{rule.threshold, rule.with_position && limits.has_triggers()},
             entry_weights{own.weight, own.key_length}, limits.most_target(), stream);
  launch(carry_entries<Scalar>{cache, state, rule, work.plan, own}, heads, stream);
}

}  // namespace kvmeld::cuda::detail
