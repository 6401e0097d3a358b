/// fold's plan of a prompt, launch by launch.
#pragma once

#include "kvfold/cuda/policies/fold/plans.cuh"
#include "kvfold/cuda/policies/fold/space.cuh"
#include "kvfold/cuda/policies/fold/values.cuh"
#include "kvfold/cuda/search/clusters.cuh"
#include "kvfold/cuda/search/seeds.cuh"

namespace kvfold::cuda::detail {

/// The nearest of `count` centres to every slot of `rows`.
template <class Scalar, index_t Depth>
void find_centres(const cache_view<Scalar>& cache, const keep_evict_partition& d,
                  const slot_lists& rows, const index_t* count, const centre_rows& centres,
                  stream stream) {
  using kernel = nearest_centre<Scalar, Depth>;
  constexpr index_t tile = kernel::shape::rows;
  launch(kernel{cache, d.rows, rows, count, centres, d.nearest, cache.aligned()},
         {cache.blocks(), static_cast<unsigned>((cache.capacity + tile - 1) / tile)}, stream);
}

/// Clusters of all slots but the outliers, fitted on the reference queries; those before them are
/// remembered with them. What was pinned, then the seeds, and at last the last round's centres lie
/// in `prompt.centres`. Twenty-one launches, three for every round but the first, and those of
/// `fit_values`.
template <class Scalar>
void fold_clusters(const fold_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                   const query_rows<Scalar>& reference, const head_budgets& limits,
                   const fold_plan_memory& work, stream stream) {
  const auto heads = cache.blocks();
  const auto shares = [](index_t n, index_t of) {
    return static_cast<unsigned>((n + of - 1) / of);
  };
  const keep_evict_partition& d = work.divided;
  const fold_scratch& own = work.fold;
  const prompt_scratch& more = work.prompt;
  const prompt_options& options = rule.prompt;

  // Slots that keep their bytes.
  launch(remember_reference<Scalar>{cache, state, rule,
                                    reference.reference(reference.count + reference.before)},
         {heads}, stream);
  leverage_of_keys(cache, state, rule, limits, false, d.rows, own.leverage, stream);
  launch(pool_leverage<Scalar>{cache, d, options.pool, options.outlier, own.leverage.leverage,
                               more.least},
         {heads}, stream);
  select_into(d, pin_rule{rule, own.leverage.leverage, more.least, false}, cache, state, limits,
              stream);

  // The mass of slots, and the space.
  const chosen_rows<Scalar> queries{reference, reference.data, reference.count, d.rows};
  column_scores(cache, queries, {}, {.total = own.sum}, own.measure, stream);
  using weigh = weigh_slots<Scalar, chosen_rows<Scalar>>;
  launch(weigh{cache, queries, own.sum, own.mass}, {heads, shares(cache.capacity, weigh::threads)},
         stream);
  using metric = query_metric<Scalar>;
  launch(metric{cache, queries, more.space.metric}, {heads, shares(cache.dim, metric::rows)},
         stream);
  using squares = space_squares<Scalar>;
  launch(squares{cache, d.rows, more.space.metric, own.leverage.leverage, more.distance},
         {heads, shares(cache.capacity, squares::slots)}, stream);
  launch(
      weigh_space<Scalar>{cache, d.rows, own.leverage.leverage, more.distance, own.mass,
                          options.floor, more.space.inverse, more.space.square, more.space.weight},
      {heads}, stream);

  // Seeds, then rounds of Lloyd's.
  const auto place = [&](const slot_lists& members, const index_t* begin) {
    launch(
        mean_centres<Scalar>{cache, more.space, d.rows, members, begin, d.kept_count, more.centres},
        {heads, shares(limits.most_target(), 32)}, stream);
  };
  const auto find = [&] {
    if (cache.dim <= 128) {
      find_centres<Scalar, 128>(cache, d, d.removed_list(), d.kept_count, more.centres, stream);
    } else {
      find_centres<Scalar, 256>(cache, d, d.removed_list(), d.kept_count, more.centres, stream);
    }
  };
  place(d.kept_list(), nullptr);
  find();
  launch(farthest_first<Scalar>{cache, more.space, d, more.centres, more.distance,
                                more.seeds_compared, limits},
         {heads}, stream);
  place(d.kept_list(), nullptr);
  for (index_t round = 1; round < options.rounds; ++round) {
    find();
    launch(group_members<Scalar>{cache, d.rows, d.removed_list(), d.nearest.into, d.kept_count,
                                 more.members, more.seeds_compared, more.centre, work.plan.begin},
           {heads}, stream);
    place({more.members, d.removed_count}, work.plan.begin);
  }
  find();
  launch(name_clusters<Scalar>{cache, d}, {heads}, stream);
  launch(make_rows<Scalar, join_all>{cache, state, d, work.plan, {}}, {heads}, stream);
  launch(fit_rows<Scalar, chosen_rows<Scalar>>{cache, work.plan, d.into, queries, own.sum, own.mass,
                                               own.measure.log_sum_exp},
         {heads, shares(limits.most_target(), 64)}, stream);
  plan_view plan = work.plan;
  if (options.ridge > 0) {
    fit_values(rule, cache, work.plan, d.into, queries, own.measure.log_sum_exp, more.values,
               stream);
    plan.value_correction = more.values.correction;
  }
  apply(plan, cache, state, stream);
}

}  // namespace kvfold::cuda::detail
