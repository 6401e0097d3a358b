// SPDX-License-Identifier: MIT
/// fold after a prompt: clusters of slots, launch by launch.
#pragma once

#include "kvmeld/cuda/policies/fold/memory.cuh"
#include "kvmeld/cuda/policies/fold/space.cuh"

namespace kvmeld::cuda::detail {

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
  seeds.limits = limits, seeds.evicted = rule.evicts_scored() ? work.fold.evicted : nullptr;
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

}  // namespace kvmeld::cuda::detail
