/// Back to the budget with plans: selected, matched, weighed and carried out on the device.
#pragma once

#include "kvfold/cuda/apply.cuh"
#include "kvfold/cuda/match.cuh"
#include "kvfold/cuda/memory.cuh"
#include "kvfold/cuda/residual.cuh"
#include "kvfold/cuda/rows.cuh"
#include "kvfold/cuda/select.cuh"

namespace kvfold::cuda::detail {

/// The nearest kept slot of every leaving one.
template <class Similarity, class Scalar>
void match_divided(const Similarity& similarity, const cache_view<Scalar>& cache,
                   const plan_memory& work, stream stream) {
  cuda::match(similarity, cache, work.divided.leaving_list(), work.divided.kept_list(),
              work.divided.nearest, {work.norm, match_workspace_bytes(cache.heads, cache.capacity)},
              stream);
}

/// From a division to the rows of the plan: four launches.
template <class Scalar>
void merge_divided(const residual_rule& rule, const cache_view<Scalar>& cache,
                   const state_view& state, index_t target, const plan_memory& work,
                   stream stream) {
  launch(place_residuals<Scalar>{cache, state, rule, work.divided},
         {static_cast<unsigned>(cache.heads)}, stream);
  match_divided(dot_similarity{}, cache, work, stream);
  write_rows(cache, state, work.divided, work.plan, join_all{}, residual_weights{rule.alpha},
             target, stream);
}

/// What follows every return to the budget.
template <class Scalar, class Rule>
void settle(const Rule&, const cache_view<Scalar>&, const state_view&, index_t, stream) {}
template <class Scalar>
void settle(const residual_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
            index_t target, stream stream) {
  launch(settle_residuals<Scalar>{cache, state, rule, target}, {static_cast<unsigned>(cache.heads)},
         stream);
}

/// Brings every head that `limit` asks to `limit.target` slots.
template <class Scalar, class Rule>
void plan_and_apply(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                    const budget& limit, const plan_memory& work, stream stream) {
  if constexpr (Rule::merges) {
    select_into(work.divided, rule, cache, state, limit, stream);
    merge_divided(rule, cache, state, limit.target, work, stream);
  } else {
    select(rule, cache, state, limit, work.plan, stream);
  }
  apply(work.plan, cache, state, stream);
  settle(rule, cache, state, limit.target, stream);
}

}  // namespace kvfold::cuda::detail
