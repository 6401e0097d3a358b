/// KeepKV's plan of a prompt, launch by launch.
#pragma once

#include "kvfold/cuda/memory/plan_memory.cuh"
#include "kvfold/cuda/merge/apply.cuh"
#include "kvfold/cuda/policies/keepkv/leaders.cuh"
#include "kvfold/cuda/search/drop_rows.cuh"

namespace kvfold::cuda::detail {

template <class Scalar, index_t Depth>
void join(const keepkv_rule& rule, const cache_view<Scalar>& cache, const plan_memory& work,
          float* norm, stream stream) {
  norms(cache, norm, stream);
  launch(join_leaders<Scalar, Depth>{cache, work.divided, norm, rule.similarity, cache.aligned()},
         {cache.blocks()}, stream);
}

/// KeepKV's prompt: merged first, then evicted. Ten launches.
template <class Scalar>
void merge_first(const keepkv_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                 const head_budgets& limits, const plan_memory& work, stream stream) {
  const extent heads{cache.blocks()};
  const keep_evict_partition& d = work.divided;
  const index_t rows = limits.most_target();
  launch(order_joiners<Scalar>{cache, state, rule, limits, d}, heads, stream);
  if (cache.dim <= 128) {
    join<Scalar, 128>(rule, cache, work, work.plan.log_mass, stream);
  } else {
    join<Scalar, 256>(rule, cache, work, work.plan.log_mass, stream);
  }
  launch(limit_joins<Scalar>{cache, d, limits}, heads, stream);
  write_rows(cache, state, d, work.plan, join_all{}, row_votes{d.similarity}, rows, stream);
  launch(
      drop_rows<Scalar, protected_rows<keepkv_rule>>{cache, state, {rule}, d, limits, d.similarity},
      heads, stream);
  write_rows(cache, state, d, work.plan, join_all{}, vote_weights{}, rows, stream);
  apply(work.plan, cache, state, stream);
}

}  // namespace kvfold::cuda::detail
