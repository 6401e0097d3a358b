// SPDX-License-Identifier: MIT
/// ems on the device.
#pragma once

#include "kvmeld/cuda/memory/wide_rows.cuh"
#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/cuda/policies/ems/plans.cuh"
#include "kvmeld/policies/ems.hpp"

namespace kvmeld::cuda {

template <>
struct device_policy<ems> {
  /// Refused: merges of un-rotated keys; without position, a rotation of part of a head.
  static ems_rule rule(const ems& policy, const attention_spec& spec) {
    expects(!policy.merge_unrotated, "cuda ems: expected merge_unrotated=0, got 1");
    return {policy.combine,
            policy.sinks,
            policy.window,
            policy.kernel,
            policy.gamma,
            policy.threshold,
            policy.with_position,
            policy.table,
            policy.with_position ? rope_params{} : rope_params_of(spec.rope, spec.key_dim)};
  }
  template <class Scalar>
  static void observe(const ems&, const ems_rule& rule, const cache_view<Scalar>& cache,
                      const state_view& state, const query_rows<row_number<Scalar>>& queries,
                      const detail::prompt_memory<ems_rule>& work, stream stream) {
    const auto rows =
        detail::wide_rows(cache, budget{.slots = 0}, work.plan.wide.of_keys(), stream);
    detail::observe_tokens(rule, rows, state, queries, work, stream);
  }
  template <class Scalar>
  static void plan(const ems_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                   const head_budgets& limits, const detail::ems_plan_memory& work, stream stream) {
    bring_to(rule, cache, state, limits, false, work, stream);
  }
  template <class Scalar>
  static void plan_prompt(const ems&, const ems_rule& rule, const cache_view<Scalar>& cache,
                          const state_view& state, const query_rows<row_number<Scalar>>&,
                          const head_budgets& limits, const detail::ems_plan_memory& work,
                          stream stream) {
    bring_to(rule, cache, state, limits, true, work, stream);
  }

 private:
  template <class Scalar>
  static void bring_to(const ems_rule& rule, const cache_view<Scalar>& cache,
                       const state_view& state, const head_budgets& limits, bool prompt,
                       const detail::ems_plan_memory& work, stream stream) {
    const auto rows = detail::wide_rows(cache, limits, work.wide, stream);
    detail::merge_entries(rule, rows, state, limits, prompt, work, stream);
    apply(work.plan, cache, state, stream);
  }
};

}  // namespace kvmeld::cuda
