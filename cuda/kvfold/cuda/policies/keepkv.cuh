/// keepkv on the device.
#pragma once

#include "kvfold/cuda/merge/remove_into_nearest.cuh"
#include "kvfold/cuda/policies/device_policy.cuh"
#include "kvfold/cuda/policies/keepkv/estimates.cuh"
#include "kvfold/cuda/policies/keepkv/plans.cuh"
#include "kvfold/policies/keepkv.hpp"

namespace kvfold::cuda {

template <>
struct device_policy<keepkv> {
  static keepkv_rule rule(const keepkv& policy, const budget& limit, index_t) {
    expects(policy.variant == keepkv::mode::paper,
            "cuda keepkv: the paper's mode expected, the code's came");
    return {group_combine::sum, policy.sinks, share_of(policy.recent, limit.target),
            policy.similarity, policy.decay};
  }
  template <class Scalar>
  static void observe(const keepkv& policy, const keepkv_rule& rule,
                      const cache_view<Scalar>& cache, const state_view& state,
                      const query_rows<Scalar>& queries, const detail::prompt_memory<keepkv_rule>&,
                      stream stream) {
    if (cache.dim <= 128) {
      detail::estimate<Scalar, 128>(rule, cache, state, queries.reference(policy.window), stream);
    } else {
      detail::estimate<Scalar, 256>(rule, cache, state, queries.reference(policy.window), stream);
    }
  }
  /// Six launches.
  template <class Scalar>
  static void plan(const keepkv_rule& rule, const cache_view<Scalar>& cache,
                   const state_view& state, const budget& limit, const detail::plan_memory& work,
                   stream stream) {
    detail::select_into(work.divided, rule, cache, state, limit, stream);
    detail::match_divided(cosine_similarity{}, cache, work, stream);
    detail::write_rows(cache, state, work.divided, work.plan, detail::join_above{rule.similarity},
                       detail::vote_weights{}, limit.target, stream);
    apply(work.plan, cache, state, stream);
  }
  template <class Scalar>
  static void plan_prompt(const keepkv& policy, const keepkv_rule& rule,
                          const cache_view<Scalar>& cache, const state_view& state,
                          const query_rows<Scalar>&, const budget& limit,
                          const detail::plan_memory& work, stream stream) {
    if (policy.merge_first) {
      detail::merge_first(rule, cache, state, limit.target, work, stream);
    } else {
      plan(rule, cache, state, limit, work, stream);
    }
  }
  template <class Scalar>
  static void remove_one(const keepkv_rule& rule, const cache_view<Scalar>& cache,
                         const state_view& state, const budget&,
                         const detail::step_memory<keepkv_rule>& work, stream stream) {
    detail::remove_nearest(rule, cache, state, work.partial, stream);
  }
};

}  // namespace kvfold::cuda
