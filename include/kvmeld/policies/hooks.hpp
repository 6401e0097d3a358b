// SPDX-License-Identifier: MIT
/// What runs a policy over a head: its members, or defaults for those that it omits; its plan,
/// carried out.
#pragma once

#include <algorithm>  // std::min
#include <concepts>   // std::same_as

#include "kvmeld/budget.hpp"
#include "kvmeld/merge/apply.hpp"
#include "kvmeld/merge/merge_rows.hpp"
#include "kvmeld/policies/traits.hpp"
#include "kvmeld/score/attention.hpp"

namespace kvmeld::inline v0 {

namespace detail {

/// Slots that are never evicted from a head of `target`.
template <class P>
auto protected_slots_of(const P& p, const head_ref& head, index_t target) {
  return protected_slots(head, protection_of(p, head, target));
}

/// What slots are ranked by where a policy scores them; NaN ranks last.
template <class P>
auto score_of(const P& p, const head_ref& head, const head_state& state) {
  return [&p, &head, &state](index_t s) {
    const auto score = p.score(head, state, s);
    if constexpr (std::same_as<decltype(score), const float>) {
      return rank(score);
    } else {
      return score;
    }
  };
}

}  // namespace detail

/// What runs a policy over a head, `hooks(policy).plan(...)`, with a default for every member that
/// it omits; of a policy chosen at run time, the one inside. What is defined outside of the class
/// `kvmeld::compiled` has.
template <class P>
class hooks {
 public:
  explicit hooks(const P& policy) : p_(policy) {}

  /// One decode step's attention, or reference queries.
  void observe(const head_ref& head, head_state& state, const observation& seen) const;
  void observe(const head_ref& head, head_state& state, const query_view<float>& seen) const;

  /// A plan on `queries`, if there are any and the policy takes them.
  void plan(const head_ref& head, const head_state& state, const query_view<float>& queries,
            index_t target, slot_scratch& work, merge_plan& out) const;

  /// The policy's memory follows a plan before it is applied.
  void update_memory(const head_ref& head, head_state& state, const merge_plan& change,
                     slot_scratch& work) const;
  void after_compress(const head_ref& head, head_state& state, index_t target) const;

  /// Attention over what the policy has made of the head: its own mass function, or log-mass.
  void attend(const head_ref& head, const head_state& state, const float* q, float* out,
              std::span<float> probabilities, std::span<float> log_sum_exp) const;

 private:
  void observe_any(const head_ref& head, head_state& state, const auto& seen) const {
    if constexpr (detail::chosen_at_run_time<P>) {
      p_.visit([&](const auto& one) { kvmeld::hooks(one).observe(head, state, seen); });
    } else if constexpr (requires { p_.observe(head, state, seen); }) {
      p_.observe(head, state, seen);
    }
  }
  const P& p_;
};

template <class P>
void hooks<P>::observe(const head_ref& head, head_state& state, const observation& seen) const {
  observe_any(head, state, seen);
}
template <class P>
void hooks<P>::observe(const head_ref& head, head_state& state,
                       const query_view<float>& seen) const {
  observe_any(head, state, seen);
}

template <class P>
void hooks<P>::plan(const head_ref& head, const head_state& state, const query_view<float>& queries,
                    index_t target, slot_scratch& work, merge_plan& out) const {
  if constexpr (detail::chosen_at_run_time<P>) {
    return p_.visit(
        [&](const auto& one) { kvmeld::hooks(one).plan(head, state, queries, target, work, out); });
  } else {
    if constexpr (detail::plans_with_queries<const P>) {
      if (queries.count > 0) {
        return p_.plan(head, state, queries, target, work, out);
      }
    }
    if constexpr (detail::makes_plans<const P>) {
      p_.plan(head, state, target, work, out);
    } else {
      evict(head, target, detail::protected_slots_of(p_, head, target),
            detail::score_of(p_, head, state), work, out);
    }
  }
}

template <class P>
void hooks<P>::update_memory(const head_ref& head, head_state& state, const merge_plan& change,
                             slot_scratch& work) const {
  if constexpr (detail::chosen_at_run_time<P>) {
    p_.visit([&](const auto& one) { kvmeld::hooks(one).update_memory(head, state, change, work); });
  } else if constexpr (requires { p_.update_memory(head, state, change, work); }) {
    p_.update_memory(head, state, change, work);
  }
}

template <class P>
void hooks<P>::after_compress(const head_ref& head, head_state& state, index_t target) const {
  if constexpr (detail::chosen_at_run_time<P>) {
    p_.visit([&](const auto& one) { kvmeld::hooks(one).after_compress(head, state, target); });
  } else if constexpr (requires { p_.after_compress(head, state, target); }) {
    p_.after_compress(head, state, target);
  }
}

template <class P>
void hooks<P>::attend(const head_ref& head, const head_state& state, const float* q, float* out,
                      std::span<float> probabilities, std::span<float> log_sum_exp) const {
  if constexpr (detail::chosen_at_run_time<P>) {
    p_.visit([&](const auto& one) {
      kvmeld::hooks(one).attend(head, state, q, out, probabilities, log_sum_exp);
    });
  } else if constexpr (requires { p_.mass(head, state); }) {
    kvmeld::attend(head, p_.mass(head, state), q, out, probabilities, log_sum_exp);
  } else {
    kvmeld::attend(head, log_mass_of{head}, q, out, probabilities, log_sum_exp);
  }
}

namespace detail {

/// A state that was made by this policy, with these options: of its name, columns and memory.
/// Another policy's numbers mean something else: to go on, make a state and measure what remains.
template <policy P>
void expect_state(const P& p, const head_ref& head, const head_state& state) {
  expects(state.policy() == p.name(), p.name(), ": expected a state for ", p.name(),
          ", got one for ", state.policy().empty() ? "no policy" : state.policy());
  const index_t columns = traits::columns(p);
  const std::size_t memory =
      traits::memory(p, head.row_dim(), head.group(), state.memory_capacity());
  expects(state.slot_stats() == columns && state.memory().size() == memory, p.name(),
          ": expected a state of ", columns, " columns and ", memory, " floats, got ",
          state.slot_stats(), " columns and ", state.memory().size(),
          " floats (made with other options, or for a head of another shape)");
}

}  // namespace detail

/// Makes the plan that brings `head` to `target` slots: the identity when it holds no more. Merges
/// whose result the head's storage cannot hold are left out of it: these slots are evicted.
/// Refused: a state that does not fit, queries missing where the policy plans on them.
template <policy P, class Query>
void plan(const P& p, const head_ref& head, const head_state& state,
          const query_view<Query>& queries, index_t target, slot_scratch& work, merge_plan& out) {
  expects(state.length() == head.length(), "plan: expected a state of ", head.length(),
          " slots (extend it), got ", state.length());
  if (!traits::evicts(p) || head.length() <= target) {
    return keep_all(head, out);
  }
  const auto make = [&](const query_view<float>& own) {
    hooks(p).plan(head, state, own, target, work, out);
  };
  traits::uses_queries(p) ? in_floats(queries, head.group(), head.dim(), make) : make(no_queries);
  out.set_for_rotated_values(head.rotates_values());
  merge::keep_in_range(head, out);
}

/// The same without queries, as in decode.
template <policy P>
void plan(const P& p, const head_ref& head, const head_state& state, index_t target,
          slot_scratch& work, merge_plan& out) {
  plan(p, head, state, no_queries, target, work, out);
}

/// Carries out a plan, and takes the policy's memory along. Refused, with nothing changed: a state
/// for another policy or with other options, and all that `apply` without a policy refuses.
template <policy P>
void apply(const P& p, const merge_plan& change, const head_ref& head, head_state& state,
           slot_scratch& work) {
  detail::expect_state(p, head, state);
  merge::expect_applies(change, head, state);
  state.extend(head.length());
  hooks(p).update_memory(head, state, change, work);
  merge::carry_out(change, head, state);
}

/// The budget of a head that never holds more than `slots` between steps, `eviction_batch` at once.
template <policy P>
budget budget_within(const P& p, index_t slots) {
  const index_t free = std::min(traits::eviction_batch(p, slots), slots - traits::min_budget(p));
  const index_t target = std::max(slots - std::max(free, index_t{0}), index_t{1});
  return {target, budget{slots}.trigger_length()};
}

}  // namespace kvmeld::inline v0
