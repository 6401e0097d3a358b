// SPDX-License-Identifier: MIT
/// What the kernels know of a policy, a *rule*: how a probability enters a slot's score, which
/// slots are protected, in what order the others are evicted. A rule is numbers; those that depend
/// on a head's budget are made where it is run, `rule.of_target(target)`.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"
#include "kvmeld/cuda/memory/view.cuh"
#include "kvmeld/score/observation.hpp"

namespace kvmeld::cuda {

/// One head as a rule sees it.
struct head_context {
  const index_t* position;  ///< [capacity]
  const float* log_mass;    ///< [capacity]
  float* columns;
  std::ptrdiff_t stride;  ///< column to column
  float* memory;
  index_t newest;        ///< the latest position
  index_t head;          ///< which one it is
  std::ptrdiff_t first;  ///< its slot 0 in a call's own arrays `[heads, capacity]`

  KVMELD_DEVICE float& column(index_t c, index_t s) const { return columns[c * stride + s]; }
};

template <class Scalar>
KVMELD_DEVICE head_context context_of(const cache_view<Scalar>& cache, const state_view& state,
                                      index_t h, index_t newest) {
  return {cache.position_of(h),
          cache.log_mass_of(h),
          state.columns_of(h),
          state.column_stride,
          state.memory_of(h),
          newest,
          h,
          cache.slot(h, 0)};
}

/// The latest position among a head's `n` slots, by a block.
template <class Scalar, index_t Threads>
KVMELD_DEVICE index_t newest_of(of_warps<index_t, Threads>& shared, const cache_view<Scalar>& cache,
                                index_t h, index_t n) {
  index_t newest = -1;
  for (index_t s = thread_index(); s < n; s += Threads) {
    const index_t p = cache.position_of(h)[s];
    newest = p > newest ? p : newest;
  }
  return block_max(shared, newest);
}

/// Attention alone.
struct no_rule {
  static constexpr index_t columns = 0;  ///< of the state, that it reads and writes
  static constexpr bool observes = false, evicts = false, merges = false;
  group_combine combine = group_combine::sum;

  KVMELD_DEVICE void observed(const head_context&) const {}
  KVMELD_DEVICE bool is_protected(const head_context&, index_t) const { return true; }
  KVMELD_DEVICE unsigned order(const head_context&, index_t) const { return 0; }
};

/// A rule that observes has `observed_columns`, how many of a slot's columns that changes, the
/// first ones, and `observe(head, column, a)`: the group's probability `a` enters the slot's
/// `column [observed_columns]`; given back is what the slot's order is of then.
template <class Rule>
constexpr index_t observed_columns() {
  if constexpr (requires { Rule::observed_columns; }) {
    return Rule::observed_columns;
  } else {
    return 0;
  }
}

/// Do all steps make plans? Other rules have the slot of lowest order removed where one goes.
template <class Rule>
inline constexpr bool always_plans = requires {
  Rule::always_plans;
};

/// Does `device_policy::observe` measure a prompt for it?
template <class Rule>
inline constexpr bool observes_prompts = Rule::observes || requires {
  Rule::observes_prompts;
};

/// Does a rule observe logits, `rule.observe_logits(log_mass, column, ln mean_g exp(logit_g))`, and
/// not probabilities?
template <class Rule>
inline constexpr bool seeks_logits = requires(const Rule& rule, float x) {
  rule.observe_logits(x, &x, x);
};

/// Do tokens share entries? Then `rule.masses` is their attention, and `rule.observe_entry`
/// observes them.
template <class Rule>
inline constexpr bool shares_entries = requires {
  Rule::shares;
};

/// Does a rule remember the steps' queries (`rule.remember`)?
template <class Rule>
inline constexpr bool remembers = requires {
  Rule::remembers;
};

/// Does the second launch of a step merge the removed slot itself (`rule.merge_removed`), and name
/// slots afterwards (`rule.after_compress`)?
template <class Rule>
inline constexpr bool merges_removed = requires {
  Rule::merges_removed;
};

namespace detail {

/// Refuses a state that lacks the columns or the memory of a rule.
template <class Rule, class Scalar>
void check_rule(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                const char* what) {
  std::size_t floats = 0;
  if constexpr (requires { rule.memory(cache.dim, cache.group, cache.stride()); }) {
    floats = rule.memory(cache.dim, cache.group, cache.stride());
  }
  check(state, cache, Rule::columns, floats, what);
}

}  // namespace detail

/// `of(g)` of a group's query heads as one number; no number is below 0.
template <class Of>
KVMELD_DEVICE float combined(group_combine how, index_t group, Of of) {
  float a = 0;
  for (index_t g = 0; g < group; ++g) {
    a = kvmeld::score::with_query_head(how, a, of(g));
  }
  return kvmeld::score::of_group(how, a, group);
}

/// The rule of a head that is to hold `target` slots: the same, or a copy with what depends on
/// them.
template <class Rule>
KVMELD_DEVICE decltype(auto) under_target(const Rule& rule, [[maybe_unused]] index_t target) {
  if constexpr (requires(Rule its) { its.of_target(target); }) {
    Rule its = rule;
    its.of_target(target);
    return its;
  } else {
    return (rule);
  }
}

/// The rule for a plan of this head's `n` slots, `target` of which stay: what it depends on is
/// counted by the block.
template <class Rule, index_t Threads>
KVMELD_DEVICE Rule prepared(const Rule& any, index_t target, of_warps<index_t, Threads>& shared,
                            const head_context& head, index_t n) {
  Rule rule = under_target(any, target);
  if constexpr (requires { rule.of_head(head, n); }) {
    rule.of_head(head, n);
  }
  if constexpr (requires { rule.counted(head, n); }) {
    index_t count = 0;
    for (index_t s = thread_index(); s < n; s += Threads) {
      count += rule.counted(head, s) ? 1 : 0;
    }
    rule.prepare(block_sum(shared, count));
  }
  return rule;
}

}  // namespace kvmeld::cuda
