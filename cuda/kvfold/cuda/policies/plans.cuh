/// Back to the budget with plans: selected, matched, weighed and carried out on the device.
#pragma once

#include <type_traits>  // std::is_same_v

#include "kvfold/cuda/memory/work_memory.cuh"
#include "kvfold/cuda/merge/apply.cuh"
#include "kvfold/cuda/merge/rows.cuh"
#include "kvfold/cuda/policies/d2o/rule.cuh"
#include "kvfold/cuda/policies/ems/plans.cuh"
#include "kvfold/cuda/policies/fold/plans.cuh"
#include "kvfold/cuda/policies/keepkv/leaders.cuh"
#include "kvfold/cuda/policies/kvmerger/runs.cuh"
#include "kvfold/cuda/policies/zsmerge/residual.cuh"
#include "kvfold/cuda/search/drop_rows.cuh"
#include "kvfold/cuda/search/match.cuh"
#include "kvfold/cuda/search/select.cuh"

namespace kvfold::cuda::detail {

/// The nearest kept slot of every leaving one.
template <class Similarity, class Scalar>
void match_divided(const Similarity& similarity, const cache_view<Scalar>& cache,
                   const plan_memory& work, stream stream) {
  cuda::match(similarity, cache, work.divided.leaving_list(), work.divided.kept_list(),
              work.divided.nearest,
              {work.divided.similarity, match_workspace_bytes(cache.heads, cache.capacity)},
              stream);
}

/// From a division to the rows of the plan: four launches.
template <class Scalar>
void merge_divided(const zsmerge_rule& rule, const cache_view<Scalar>& cache,
                   const state_view& state, index_t target, const plan_memory& work,
                   stream stream) {
  launch(place_residuals<Scalar>{cache, state, rule, work.divided},
         {static_cast<unsigned>(cache.heads)}, stream);
  match_divided(dot_similarity{}, cache, work, stream);
  write_rows(cache, state, work.divided, work.plan, join_all{}, residual_weights{rule.alpha},
             target, stream);
}

/// Two launches more for the norms and the matches, then the rows.
template <class Scalar>
void merge_divided(const d2o_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                   index_t target, const plan_memory& work, stream stream) {
  match_divided(cosine_similarity{}, cache, work, stream);
  write_rows(cache, state, work.divided, work.plan, join_above_mean{rule},
             absorb_weights{work.divided.similarity}, target, stream);
}
template <class Scalar>
void merge_divided(const keepkv_rule& rule, const cache_view<Scalar>& cache,
                   const state_view& state, index_t target, const plan_memory& work,
                   stream stream) {
  match_divided(cosine_similarity{}, cache, work, stream);
  write_rows(cache, state, work.divided, work.plan, join_above{rule.similarity}, vote_weights{},
             target, stream);
}

/// Eight launches: neighbours joined into runs, rows, and, where they are too many, fewer rows.
template <class Scalar>
void merge_divided(const kvmerger_rule& rule, const cache_view<Scalar>& cache,
                   const state_view& state, index_t target, const plan_memory& work,
                   stream stream) {
  const auto heads = static_cast<unsigned>(cache.heads);
  const keep_evict_partition& d = work.divided;
  launch(order_by_position<Scalar>{cache, d}, {heads}, stream);
  using cosines = pair_cosines<Scalar>;
  launch(cosines{cache, d, rule.gaps_break, cache.aligned()},
         {heads, static_cast<unsigned>((cache.capacity + cosines::pairs - 1) / cosines::pairs)},
         stream);
  launch(name_runs<Scalar>{cache, state, d, target, rule.by_threshold, rule.epsilon}, {heads},
         stream);
  write_rows(cache, state, d, work.plan, join_all{}, row_scores{d.similarity}, target, stream);
  launch(drop_rows<Scalar, marked_rows>{cache, state, {}, d, target, d.similarity}, {heads},
         stream);
  write_rows(cache, state, d, work.plan, join_all{},
             gaussian_weights{rule.sigma, rule.scale_values}, target, stream);
}

template <class Scalar, index_t Depth>
void walk(const keepkv_rule& rule, const cache_view<Scalar>& cache, const plan_memory& work,
          float* norm, stream stream) {
  norms(cache, norm, stream);
  launch(
      walk_to_leaders<Scalar, Depth>{cache, work.divided, norm, rule.similarity, cache.aligned()},
      {static_cast<unsigned>(cache.heads)}, stream);
}

/// KeepKV's prompt: merged first, then evicted. Ten launches.
template <class Scalar>
void merge_first(const keepkv_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                 index_t target, const plan_memory& work, stream stream) {
  const extent heads{static_cast<unsigned>(cache.heads)};
  const keep_evict_partition& d = work.divided;
  launch(order_walkers<Scalar>{cache, state, rule, target, d}, heads, stream);
  if (cache.dim <= 128) {
    walk<Scalar, 128>(rule, cache, work, work.plan.log_mass, stream);
  } else {
    walk<Scalar, 256>(rule, cache, work, work.plan.log_mass, stream);
  }
  launch(limit_joins<Scalar>{cache, d, target}, heads, stream);
  write_rows(cache, state, d, work.plan, join_all{}, row_votes{d.similarity}, target, stream);
  launch(
      drop_rows<Scalar, protected_rows<keepkv_rule>>{cache, state, {rule}, d, target, d.similarity},
      heads, stream);
  write_rows(cache, state, d, work.plan, join_all{}, vote_weights{}, target, stream);
  apply(work.plan, cache, state, stream);
}

/// What follows every return to the budget.
template <class Scalar, class Rule>
void settle(const Rule&, const cache_view<Scalar>&, const state_view&, index_t, stream) {}
template <class Scalar>
void settle(const zsmerge_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
            index_t target, stream stream) {
  launch(settle_residuals<Scalar>{cache, state, rule, target}, {static_cast<unsigned>(cache.heads)},
         stream);
}

/// Brings every head that `limit` asks to `limit.target` slots.
template <class Scalar, class Rule>
void plan_and_apply(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                    const budget& limit, const typename plan_memory_of<Rule>::type& work,
                    stream stream) {
  if constexpr (std::is_same_v<Rule, fold_rule>) {
    return fold_pairs(rule, cache, state, limit, work, stream);
  } else if constexpr (shares_entries<Rule>) {
    return merge_entries(rule, cache, state, limit, false, work, stream);
  } else if constexpr (Rule::merges) {
    select_into(work.divided, rule, cache, state, limit, stream);
    merge_divided(rule, cache, state, limit.target, work, stream);
  } else {
    select(rule, cache, state, limit, work.plan, stream);
  }
  apply(work.plan, cache, state, stream);
  settle(rule, cache, state, limit.target, stream);
}

}  // namespace kvfold::cuda::detail
