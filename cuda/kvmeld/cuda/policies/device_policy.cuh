// SPDX-License-Identifier: MIT
/// How a policy becomes kernels.
#pragma once

#include <array>
#include <string_view>

#include "kvmeld/cuda/memory/head_budgets.cuh"
#include "kvmeld/cuda/memory/work_memory.cuh"
#include "kvmeld/cuda/merge/apply.cuh"
#include "kvmeld/cuda/merge/weigh_rows.cuh"
#include "kvmeld/cuda/score/add_sums.cuh"
#include "kvmeld/cuda/score/column_scores.cuh"
#include "kvmeld/cuda/score/rule.cuh"
#include "kvmeld/cuda/search/match.cuh"
#include "kvmeld/cuda/search/select.cuh"

namespace kvmeld::cuda {

/// What the device does for `Policy`. Specialised for each policy in a header of its own, the
/// library's in `policies/`, a user's wherever it is seen before `step` and `compress` are called:
///
///     template <>
///     struct kvmeld::cuda::device_policy<my_policy> : kvmeld::cuda::evicting_policy {
///       static sum_rule rule(const my_policy& policy, const attention_spec& spec) {
///         return {policy.combine, policy.sinks, policy.recent};
///       }
///     };
///
/// Static members, those of `evicting_policy` unless said otherwise:
///
///     rule(policy, spec)            the rule (score/rule.cuh) for a model that computes `spec`;
///                                   `kvmeld::error` for modes without a CUDA path. Required
///     observe(policy, rule, cache, state, queries, prompt_memory, stream)
///                                   a prompt's attention into the state's columns, for rules that
///                                   observe, or that say `observes_prompts`
///     plan(rule, cache, state, head_budgets, plan_memory, stream)
///                                   brings the heads that reach their budgets to the targets:
///                                   after a prompt, and in steps with a later trigger. Where the
///                                   rule says `always_plans`, in all steps; else a step with
///                                   trigger = target + 1 removes the slot of lowest order itself
///     plan_prompt(policy, rule, cache, state, queries, head_budgets, plan_memory, stream)
///                                   the same after a prompt. Default: `plan`
template <class Policy>
struct device_policy;

/// Does the device know `Policy`?
template <class Policy>
concept on_device = requires {
  sizeof(device_policy<Policy>);
};

namespace detail {

template <class Policy>
constexpr void expect_on_device() {
  static_assert(on_device<Policy>,
                "kvmeld::cuda: no device_policy for this policy. Include "
                "kvmeld/cuda/policies/<its name>.cuh, or specialise kvmeld::cuda::device_policy");
}

/// Refused (`unsupported`): what a model computes and the kernels of `whose` do not.
inline void expect_no(const char* what, bool is_there, std::string_view whose = "the") {
  expects(errc::unsupported, !is_there, "cuda: expected no ", what, " (not carried out by ", whose,
          " kernels), got one");
}

/// The rule of `policy` for the model of `cache`. Refused: an `attention_spec` of another shape,
/// cap or sinks than the cache's, or of more than the kernels compute.
template <class Policy, class Scalar, class Spec = attention_spec>
auto rule_of(const Policy& policy, const cache_view<Scalar>& cache) {
  expect_on_device<Policy>();
  using rule_type = decltype(device_policy<Policy>::rule(policy, Spec{}));
  if constexpr (requires { rule_type::plain_attention; }) {
    expect_no("soft_cap", cache.soft_cap.cap != 0, Policy::name());
    expect_no("sink_logits", cache.sink_logits != nullptr, Policy::name());
    expect_no("group above 16", cache.group > group_block, Policy::name());
  }
  if (cache.spec == nullptr) {
    return device_policy<Policy>::rule(
        policy, Spec{.kv_heads = cache.heads, .group = cache.group, .key_dim = cache.dim});
  }
  const Spec& spec = *cache.spec;
  expects(spec.key_dim == cache.dim && spec.group == cache.group,
          "cuda: expected an attention_spec with key_dim ", cache.dim, " and group ", cache.group,
          ", got ", spec.key_dim, " and ", spec.group);
  const bool has_sinks = !spec.sink_logits.empty();
  expects(spec.soft_cap == cache.soft_cap.cap && has_sinks == (cache.sink_logits != nullptr),
          "cuda: expected a cache with its attention_spec's soft_cap and sink_logits, ",
          spec.soft_cap, has_sinks ? " and some" : " and none", ", got ", cache.soft_cap.cap,
          cache.sink_logits != nullptr ? " and some" : " and none");
  expect_no("alibi_slopes", !spec.alibi_slopes.empty());
  expect_no("window", spec.window != 0);
  expect_no("value_dim other than key_dim", spec.value_dim != 0 && spec.value_dim != spec.key_dim);
  return device_policy<Policy>::rule(policy, spec);
}

/// A policy's columns; without any an empty array.
template <class Policy>
auto columns_of(const Policy& policy) {
  if constexpr (requires { policy.slot_stats(); }) {
    return policy.slot_stats();
  } else if constexpr (requires { policy.columns_used(); }) {
    return policy.columns_used();
  } else if constexpr (requires { Policy::columns; }) {
    return Policy::columns;
  } else {
    struct none {
      slot_reduce reduce;
      float initial;
    };
    return std::array<none, 0>{};
  }
}

/// Throws on options that a policy refuses.
template <class Policy>
void expect_valid(const Policy& policy) {
  if constexpr (requires { validate(policy); }) {  // the library's
    validate(policy);
  } else {
    policy.validate();
  }
}

/// Floats of memory that a policy keeps of a head.
template <class Policy, class Scalar>
std::size_t memory_of(const Policy& policy, const cache_view<Scalar>& cache) {
  if constexpr (requires { policy.memory(cache.dim, cache.group, cache.stride()); }) {
    return policy.memory(cache.dim, cache.group, cache.stride());
  } else {
    return 0;
  }
}

/// Refuses a state that is not `policy`'s.
template <class Policy, class Rule, class Scalar>
void check_state(const Policy& policy, const Rule& rule, const cache_view<Scalar>& cache,
                 const state_view& state, const char* what) {
  const auto columns = columns_of(policy);
  const auto count = static_cast<index_t>(columns.size());
  expects(state.count == count, what, ": expected ", Policy::name(), " with a state of ", count,
          " columns, got ", state.count);
  const std::size_t floats = memory_of(policy, cache);
  expects(floats == 0 || (state.floats >= 0 && static_cast<std::size_t>(state.floats) >= floats),
          "cuda ", Policy::name(), ": expected a state of ", floats,
          " floats of memory per head, got ", state.floats);
  check(state, cache, count, floats, what);
  check_rule(rule, cache, state, what);
  for (index_t c = 0; c < count; ++c) {
    const auto& column = columns[static_cast<std::size_t>(c)];
    expects(state.merges[c] == column.reduce && state.initial[c] == column.initial, what,
            ": expected ", Policy::name(), "'s merge and initial number of column ", c,
            " (make_state_view), got others");
  }
}

/// The plan of one slot a row that keeps the best, carried out: two launches.
template <class Scalar, class Rule>
void evict(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
           const head_budgets& limits, const plan_memory& work, stream stream) {
  select_into(evictions{work.plan, limits, limits.has_triggers()}, rule, cache, state, limits,
              stream);
  apply_merged(work.plan, cache, state, stream);  // every row is a slot: none has to merge
}

/// The most queries that a rule is measured on, of `queries` and those before them.
template <class Rule>
index_t measured_queries([[maybe_unused]] const Rule& rule, index_t queries) {
  if constexpr (requires { rule.window; }) {
    return queries > 0 && queries < rule.window ? rule.window : queries;
  } else {
    return queries;
  }
}

/// The nearest kept slot of every evicted one.
template <class Similarity, class Scalar>
void match_divided(const Similarity& similarity, const cache_view<Scalar>& cache,
                   const plan_memory& work, stream stream) {
  cuda::match(similarity, cache, work.divided.removed_list(), work.divided.kept_list(),
              work.divided.nearest,
              {work.divided.similarity, match_workspace_bytes(cache.heads, cache.capacity)},
              stream);
}

}  // namespace detail

/// Scores are column sums in column 0, and what is not selected is lost.
struct evicting_policy {
  template <class Policy, class Rule, class Scalar>
  static void observe(const Policy&, const Rule& rule, const cache_view<Scalar>& cache,
                      const state_view& state, const query_rows<row_number<Scalar>>& queries,
                      const detail::prompt_memory<Rule>& work, stream stream) {
    detail::add_column_sums(cache, state, queries, {.combine = rule.combine}, 1.0F, work.sums,
                            work.measure, stream);
  }
  template <class Rule, class Scalar>
  static void plan(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                   const head_budgets& limits, const detail::plan_memory& work, stream stream) {
    detail::evict(rule, cache, state, limits, work, stream);
  }
};

}  // namespace kvmeld::cuda
