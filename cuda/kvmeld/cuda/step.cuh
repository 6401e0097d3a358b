// SPDX-License-Identifier: MIT
/// The decode step.
#pragma once

#include <type_traits>  // std::remove_const_t

#include "kvmeld/cuda/attend.cuh"
#include "kvmeld/cuda/merge/observe_attended.cuh"
#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/cuda/workspace.cuh"

namespace kvmeld::cuda {

namespace detail {

/// A step that begins with `attend(rule, options, partial)`, which observes.
template <class Policy, class Scalar, class Attend>
void step_by(const Policy& policy, const cache_view<Scalar>& cache, const state_view& state,
             const head_budgets& limits, workspace memory, stream stream, Attend attend) {
  check(cache);
  const auto rule = rule_of(policy, cache);
  check_state(policy, rule, cache, state, "cuda step");
  using device = device_policy<Policy>;
  using rule_type = std::remove_const_t<decltype(rule)>;
  if constexpr (rule_type::evicts) {
    expect_valid(policy);
  }
  limits.check(cache.heads, "cuda step", [&](const budget& x) {
    expects(x.slots > 0 && x.slots < cache.capacity, "cuda step: expected a target of 1 to ",
            cache.capacity - 1, " slots (one fewer than the capacity), got ", x.slots);
    expects(x.trigger_length() > x.slots && x.trigger_length() <= cache.capacity,
            "cuda step: expected a trigger of ", x.slots + 1, " to ", cache.capacity,
            " slots, got ", x.trigger);
    if constexpr (rule_type::evicts) {
      expects(x.slots >= policy.min_budget(), "cuda step: expected ", Policy::name(),
              " with a target of at least ", policy.min_budget(), " slots, got ", x.slots);
    }
  });
  const bool plans = rule_type::evicts && (always_plans<rule_type> || !limits.one_by_one());
  workspace_allocator from(memory);
  const auto work = allocate_step(from, rule, shape_of(cache), plans);
  from.check("cuda step");
  attend(rule, step_options{true, !plans, limits}, work.partial);
  if constexpr (rule_type::evicts) {
    if (plans && !limits.none_due()) {
      device::plan(rule, cache, state, limits, work.plan, stream);
    }
  }
}

}  // namespace detail

/// One decode step of all heads: append `fresh`, attend, observe, and back to the budget: one for
/// all, `{.slots = 205}`, or `head_budgets`. Equals `kvmeld::step`. Lengths stay on the device,
/// and so does whether a slot is removed.
///
///     trigger = target + 1   two launches: a head with one slot more than its target loses one,
///                            and the new token takes its place
///     later of any head,     two, and those of a plan for the heads that have reached the trigger,
///     and policies that      unless the budgets say that none has (`head_budgets::with_none_due`)
///     merge but zsmerge
///
/// Where heads' triggers are mixed so, all take plans. One slot that leaves is then replaced by the
/// last as ever, but for zsmerge, whose slots behind it move up, in another order than the CPU's.
///
/// The first two are one where a block attends a whole head: many heads of few slots, in 16 bits.
/// What a plan costs hardly depends on how many slots it frees: a later trigger pays it once for
/// all of them.
///
/// A head that has no room for its new token gives NaN and stays as it is, but for a plan that is
/// due. Refused: budgets that do not fit, policies and modes without a CUDA path.
template <class Policy, class Scalar, budgets Budgets = budget>
void step(const Policy& policy, const cache_view<Scalar>& cache, const state_view& state,
          const row_number<Scalar>* queries, const new_tokens<row_number<Scalar>>& fresh,
          const Budgets& limits, row_number<Scalar>* out, workspace memory, stream stream) {
  expects(fresh.keys != nullptr && fresh.values != nullptr, "cuda step: expected keys and values [",
          cache.heads, ", ", cache.dim, "] of the new tokens, got null");
  detail::step_by(policy, cache, state, limits, memory, stream,
                  [&](const auto& rule, const detail::step_options& options, const auto& partial) {
                    detail::attend_and_observe(rule, cache, state, queries, fresh, options, partial,
                                               out, nullptr, stream);
                  });
}

/// The same step of an engine that attends by itself: observe, and back to the budget. Equals
/// `compressor::observe` and `compress`. K is read once more, V where rows move. Refused too
/// (`unsupported`): policies whose attention the engine cannot compute (`ems`).
template <class Policy, class Scalar, budgets Budgets = budget>
void step(const Policy& policy, const cache_view<Scalar>& cache, const state_view& state,
          const step_attention<row_number<Scalar>>& attended, const Budgets& limits,
          workspace memory, stream stream) {
  expects(attended.queries != nullptr && attended.log_sum_exp != nullptr,
          "cuda step: expected queries and log_sum_exp of the engine's attention, got null");
  detail::step_by(policy, cache, state, limits, memory, stream,
                  [&](const auto& rule, const detail::step_options& options, const auto& partial) {
                    if constexpr (shares_entries<std::remove_cvref_t<decltype(rule)>>) {
                      expects(errc::unsupported, false, "cuda step: expected a policy that ",
                              "observes an engine's own attention, got ", Policy::name());
                    } else {
                      detail::observe_attended(rule, cache, state, attended, options, partial,
                                               stream);
                    }
                  });
}

namespace detail {

/// The heads of places that accept more than `before` tokens.
struct list_accepting {
  static constexpr index_t threads = 128;
  static constexpr bool of_heads = false;
  struct shared_memory {};

  const index_t* from;  // [places] heads; null: all
  const index_t* accepted;
  index_t places, before;
  index_t* to;

  /// Grid: stretches of `threads` places.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t i = place_of_block() * threads + thread_index();
    if (i < places) {
      to[i] = accepted[i] <= before ? -1 : from == nullptr ? i : from[i];
    }
  }
};

}  // namespace detail

/// The first `accepted [heads]` of `tokens` drafted tokens of each head that a call runs, on the
/// device, as so many calls of `step`, to the bit; the others were never there. Equals
/// `compressor::accept`. `queries`, `out` `[tokens, heads, group, dim]`, `keys` and `values`
/// `[tokens, heads, dim]`, by place; outputs that are not accepted stay as they were. `list
/// [heads]` is scratch. A launch and those of a step per drafted token. Refused, with `list`
/// written: as of `step`.
template <class Policy, class Scalar, budgets Budgets = budget>
void accept(const Policy& policy, const cache_view<Scalar>& cache, const state_view& state,
            const row_number<Scalar>* queries, const new_tokens<row_number<Scalar>>& drafted,
            index_t tokens, const index_t* accepted, const Budgets& limits, row_number<Scalar>* out,
            index_t* list, workspace memory, stream stream) {
  expects(tokens >= 0 && accepted != nullptr && list != nullptr && drafted.keys != nullptr &&
              drafted.values != nullptr,
          "cuda accept: expected at least 0 tokens, how many are accepted, and a list, got ",
          tokens, " tokens or null");
  const auto places = static_cast<index_t>(cache.blocks());
  using kernel = detail::list_accepting;
  for (index_t t = 0; t < tokens; ++t) {
    const std::ptrdiff_t row = std::ptrdiff_t{t} * places * cache.dim, rows = row * cache.group;
    launch(kernel{cache.active, accepted, places, t, list}, {blocks_of(places, kernel::threads)},
           stream);
    step(policy, cache.with_active(list, places), state, queries + rows,
         new_tokens<row_number<Scalar>>{drafted.keys + row, drafted.values + row}, limits,
         out + rows, memory, stream);
  }
}

}  // namespace kvmeld::cuda
