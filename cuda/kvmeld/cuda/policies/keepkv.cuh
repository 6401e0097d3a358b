// SPDX-License-Identifier: MIT
/// keepkv on the device.
#pragma once

#include "kvmeld/cuda/device/one_after_other.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/merge/apply.cuh"
#include "kvmeld/cuda/merge/drop_rows.cuh"
#include "kvmeld/cuda/merge/weigh_rows.cuh"
#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/cuda/policies/keepkv/estimates.cuh"
#include "kvmeld/cuda/policies/keepkv/join_leaders.cuh"
#include "kvmeld/cuda/policies/keepkv/leaders.cuh"
#include "kvmeld/policies/keepkv.hpp"

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

namespace kvmeld::cuda {

template <>
struct device_policy<keepkv> {
  static keepkv_rule rule(const keepkv& policy, const attention_spec&) {
    expects(policy.variant == keepkv::mode::paper,
            "cuda keepkv: expected the paper's mode, got the code's");
    return {group_combine::sum, policy.sinks, policy.recent, policy.similarity, policy.decay};
  }
  template <class Scalar>
  static void observe(const keepkv& policy, const keepkv_rule& rule,
                      const cache_view<Scalar>& cache, const state_view& state,
                      const query_rows<row_number<Scalar>>& queries,
                      const detail::prompt_memory<keepkv_rule>&, stream stream) {
    detail::estimate(rule, cache, state, queries.reference(policy.window), stream);
  }
  /// Six launches.
  template <class Scalar>
  static void plan(const keepkv_rule& rule, const cache_view<Scalar>& cache,
                   const state_view& state, const head_budgets& limits,
                   const detail::plan_memory& work, stream stream) {
    detail::select_into(work.divided, rule, cache, state, limits, stream);
    detail::match_divided(cosine_similarity{}, cache, work, stream);
    detail::write_rows(cache, state, work.divided, work.plan,
                       detail::join_above{rule.similarity, limits.has_triggers()},
                       detail::vote_weights{}, limits.most_target(), stream);
    apply(work.plan, cache, state, stream);
  }
  template <class Scalar>
  static void plan_prompt(const keepkv& policy, const keepkv_rule& rule,
                          const cache_view<Scalar>& cache, const state_view& state,
                          const query_rows<row_number<Scalar>>&, const head_budgets& limits,
                          const detail::plan_memory& work, stream stream) {
    if (policy.merge_first) {
      detail::merge_first(rule, cache, state, limits, work, stream);
    } else {
      plan(rule, cache, state, limits, work, stream);
    }
  }
};

}  // namespace kvmeld::cuda
