// SPDX-License-Identifier: MIT
/// fold's plans, launch by launch.
#pragma once

#include "kvmeld/cuda/merge/rows.cuh"
#include "kvmeld/cuda/policies/fold/memory.cuh"
#include "kvmeld/cuda/policies/fold/pairs.cuh"
#include "kvmeld/cuda/policies/fold/pins.cuh"
#include "kvmeld/cuda/policies/fold/space.cuh"
#include "kvmeld/cuda/policies/fold/value_memory.cuh"
#include "kvmeld/cuda/policies/fold/values.cuh"
#include "kvmeld/cuda/score/rule.cuh"
#include "kvmeld/cuda/search/match.cuh"
#include "kvmeld/cuda/search/select.cuh"

namespace kvmeld::cuda::detail {

/// `kvmeld::detail::fold_pins::log_gain` on a prompt's pins by score, but for sinks and the latest:
/// behind `fit_masses`, which lists the rows that are none. A block a head.
template <class Scalar>
struct raise_pins {
  static constexpr index_t threads = 512;
  struct shared_memory {
    of_warps<index_t, threads> number;
  };

  cache_view<Scalar> cache;
  plan_view plan;
  fold_rule rule;
  const index_t* more;  // [heads] −1: no pin is by score
  value_scratch of;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), rows = plan.rows[h];
    if (rows < 0 || more[h] < 0) {
      return;
    }
    const float gain = rule.pins.log_gain(rows - of.unknowns[h], cache.next_position[h]);
    if (gain <= 0) {
      return;
    }
    const protection always{rule.pins.sinks, rule.pins.prompt_recent,
                            newest_of(shared.number, cache, h, cache.length[h])};
    const index_t* const begin = plan.begin + cache.bound(h, 0);
    for (index_t r = thread_index(); r < rows; r += threads) {
      const index_t s = plan.sources[cache.slot(h, begin[r])].source;
      float& log_mass = plan.log_mass[cache.slot(h, r)];
      if (of.place[cache.slot(h, r)] < 0 && !always(cache.position_of(h)[s])) {
        log_mass = log_mass > gain ? log_mass : gain;
      }
    }
  }
};

/// Decode, on the queries remembered: the cheapest pairs of every head that reaches its
/// budget are to merge, to its target. Fifteen launches, sixteen by scores.
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
}

/// Clusters of the slots that are not pinned, merged into their seeds (`kvmeld::search::cluster`),
/// in the space that `queries` see. The slots' masses are known. Nine launches, two for every
/// round of seeds and three for every round of Lloyd's but the first.
template <class Scalar>
void cluster_slots(const fold_rule& rule, const cache_view<Scalar>& cache,
                   const chosen_rows<Scalar>& queries, const head_budgets& limits,
                   const fold_plan_memory& work, stream stream) {
  const auto heads = cache.blocks();
  const keep_evict_partition& d = work.divided;
  const prompt_scratch& own = work.prompt;
  // In units of what is added to the diagonal: no eigenvalue is below 1.
  constexpr float least = factor_space<Scalar, 128>::least;
  covariance_of<false>(cache, reference_rows<Scalar>{queries, cache.group, cache.dim},
                       queries.count * cache.group, d.rows, 1 / least, least,
                       work.fold.leverage.moments, stream);
  const unsigned stretches = blocks_of(cache.capacity, space_sums::slots);
  launch(sum_slots<Scalar>{cache, d.rows, own.sums}, {heads, stretches}, stream);
  const clustered_points x{own.points, own.space.weight, d, {cache.active}};
  seed_lists seeds = own.seeds;
  seeds.limits = limits;
  cluster_scratch scratch = own.clusters;
  scratch.begin = work.plan.begin;
  with_depth<128, 256>(cache.dim, [&](auto depth) {
    constexpr index_t dim = decltype(depth)::value;
    launch(factor_space<Scalar, dim>{cache, d.rows, own.sums, static_cast<index_t>(stretches),
                                     work.fold.mass, rule.prompt.floor, own.space},
           {heads}, stream);
    using points = make_points<Scalar, dim>;
    launch(points{cache, d.rows, own.space, own.points, cache.aligned()},
           {heads, blocks_of(cache.capacity, points::slots)}, stream);
    cluster_points<2 * dim>(x, cache.length, seeds, scratch, rule.prompt.rounds, heads, stream);
  });
  launch(name_clusters<Scalar>{cache, d}, {heads}, stream);
}

/// A plan: clusters of all slots but the pinned, fitted on the reference queries. Ten launches,
/// eleven by scores, one more with a gain, and those of `cluster_slots`, `fit_masses` and
/// `fit_values`.
template <class Scalar>
plan_view fold_clusters(const fold_rule& rule, const cache_view<Scalar>& cache,
                        const state_view& state, const query_rows<Scalar>& reference,
                        const head_budgets& limits, const fold_plan_memory& work, stream stream) {
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
  return plan;
}

}  // namespace kvmeld::cuda::detail
