// SPDX-License-Identifier: MIT
/// KeepKV's plan of a prompt, launch by launch.
#pragma once

#include "kvmeld/cuda/device/one_after_other.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/merge/apply.cuh"
#include "kvmeld/cuda/merge/drop_rows.cuh"
#include "kvmeld/cuda/merge/weigh_rows.cuh"
#include "kvmeld/cuda/policies/keepkv/join_leaders.cuh"
#include "kvmeld/cuda/policies/keepkv/leaders.cuh"

namespace kvmeld::cuda::detail {

/// KeepKV's prompt: merged first, then evicted. Seven launches, and one for every 128 slots of the
/// capacity (floats: 64).
template <class Scalar>
void merge_first(const keepkv_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                 const head_budgets& limits, const plan_memory& work, stream stream) {
  const extent heads{cache.blocks()};
  const keep_evict_partition& d = work.divided;
  const index_t rows = limits.most_target();
  launch(order_joiners<Scalar>{cache, state, rule, limits, d, work.plan.begin}, heads, stream);
  join(cache, d, work.plan.begin, work.plan.log_mass, rule.similarity, stream);
  using make = make_rows<Scalar, join_all>;
  launch(one_after_other<limit_joins<Scalar>, make>{{cache, d, limits},
                                                    {cache, state, d, work.plan, {}}},
         heads, stream);
  weigh(cache, state, d, work.plan, row_votes{d.similarity}, rows, stream);
  remake_rows(cache, state, d, work.plan, protected_rows<keepkv_rule>{rule}, limits, d.similarity,
              stream);
  weigh(cache, state, d, work.plan, vote_weights{}, rows, stream);
  apply(work.plan, cache, state, stream);
}

}  // namespace kvmeld::cuda::detail
