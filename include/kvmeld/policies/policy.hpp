// SPDX-License-Identifier: MIT
/// What a policy is: two members, and what it may add to them.
#pragma once

#include <concepts>
#include <string_view>

#include "kvmeld/budget.hpp"
#include "kvmeld/merge/apply.hpp"
#include "kvmeld/merge/merge_rows.hpp"
#include "kvmeld/policies/hooks.hpp"
#include "kvmeld/policies/traits.hpp"

namespace kvmeld {
inline namespace v0 {

/// A KV-cache compression policy: a small value that makes plans. Two members are all it takes, a
/// name and a score or a plan:
///
///     static constexpr std::string_view name();
///
///     float score(const head_ref& head, const head_state& state, index_t slot) const;
///                                                       evicts: the highest stay. A double, or a
///                                                       pair that ties are broken by, is not
///                                                       ranked: no NaN
///     protection protects(const head_ref& head, index_t target) const;
///                                                       sinks and latest tokens that stay whatever
///                                                       their score; default none. Asked of an
///                                                       empty head too. The plan, the slot to
///                                                       remove in decode and the least budget
///                                                       follow from these
///
///     void plan(const kv_head auto& head, const head_state& state, index_t target,
///               slot_scratch& work, merge_plan& out) const;
///
/// `plan` is pure: it reads the head and the state, and writes at most `target` rows into `out`
/// (called only when the head holds more than `target` slots). `work` is memory to work in. The
/// rest is optional.
///
/// A member of these names that cannot be called so (one that is not const, say) does not compile.
///
/// Its state, and the budgets that it needs:
///
///     std::array<slot_stat, n> slot_stats() const;            one float per slot each, in
///     `head_state` std::size_t memory(index_t dim, index_t group, index_t capacity) const;
///                                                       floats per head beside the slots'
///     static constexpr bool memory_follows_capacity = true;
///                                                       does `memory` mean something else for
///                                                       another capacity, where its size is the
///                                                       same? Then states of other capacities
///                                                       are not copied
///     index_t min_budget() const;                       smallest target; default one more than is
///                                                       protected
///     bool accepts(index_t target) const;               is it at least that? Where it is known
///                                                       without a search
///     index_t eviction_batch(index_t slots) const;      slots better freed at once in decode
///     void validate() const;                            throws on parameters out of range
///     static void parameters(auto& p, auto f);          f(name, p's member) for each that
///                                                       `make_policy` may set
///     static constexpr bool evicts = false;            never compresses (full_cache)
///     static constexpr bool supports_decode = false;            compresses prompts only
///
/// What it measures:
///
///     group_combine combine;                            of the group's attention; default sum
///     void observe(const kv_head auto& head, head_state&, const observation&) const;
///                                                       one decode step's; refuses what it cannot
///                                                       do without before it changes the state
///     void observe(const kv_head auto& head, head_state&, const query_view<T>&) const;
///                                                       reference queries'
///     void plan(const kv_head auto& head, const head_state&, const query_view<T>& queries,
///               index_t target, slot_scratch& work, merge_plan& out) const; on the reference
///               queries themselves
///
/// How it decodes:
///
///     std::optional<slot_removal> choose_victim(const kv_head auto& head, const head_state&,
///                                               index_t target, const fused_similarity&) const;
///                                                       equals plan(length − 1), in O(dim) to
///                                                       apply; a plain slot_removal where there
///                                                       always is one; without one, a plan is made
///     void predict_victim(const kv_head auto& head, head_state&, index_t target,
///     fused_similarity&) const;
///                                                       before attention: the slot to compare
///                                                       with all; the result is what
///                                                       `choose_victim` gets
///     void update_memory(const kv_head auto& head, head_state&, const C& change, slot_scratch&)
///     const;
///                                                       takes `memory` along before a merge_plan
///                                                       or a slot_removal is applied, which fits
///     void after_compress(const kv_head auto& head, head_state&, index_t target) const;
///                                                       after every return to the budget
///     auto mass(const kv_head auto& head, const head_state&) const;
///                                                       (slot, q·k) ↦ logit, if not scale · q·k +
///                                                       log-mass
template <class P>
concept policy = std::copyable<P> &&
    (detail::makes_plans<const P> || detail::scores_slots<const P>)&&requires(const P& p) {
  { p.name() } -> std::convertible_to<std::string_view>;
};

/// Makes the plan that brings `head` to `target` slots: the identity when it holds no more. Merges
/// whose result the head's storage cannot hold are left out of it: these slots are evicted.
/// Refused: a state that does not fit, queries missing where the policy plans on them.
template <policy P, class Query>
void plan(const P& p, const head_ref& head, const head_state& state,
          const query_view<Query>& queries, index_t target, slot_scratch& work, merge_plan& out) {
  expects(state.length() == head.length(), "plan: expected a state of ", head.length(),
          " slots (extend it), got ", state.length());
  if (!traits::evicts(p) || head.length() <= target) {
    out.reset(head.length());
    for (index_t s = 0; s < head.length(); ++s) {
      out.keep(s, head.log_mass(s));
    }
    return;
  }
  traits::plan(p, head, state, queries, target, work, out);
  merge::keep_in_range(head, out);
}

/// The same without queries, as in decode.
template <policy P>
void plan(const P& p, const head_ref& head, const head_state& state, index_t target,
          slot_scratch& work, merge_plan& out) {
  plan(p, head, state, no_queries, target, work, out);
}

namespace detail {

/// A state for another policy has numbers that mean something else. To go on with another policy is
/// to make a state for it, and to measure what remains.
template <policy P>
void expect_policy(const P& p, const head_state& state) {
  expects(state.policy() == p.name(), p.name(), ": expected a state for ", p.name(),
          ", got one for ", state.policy().empty() ? "no policy" : state.policy());
}

}  // namespace detail

/// Carries out a plan or a removal, and takes the policy's memory along. Refused, with nothing
/// changed: a state for another policy, and all that `apply` without a policy refuses.
template <policy P, class Change>
void apply(const P& p, const Change& change, const head_ref& head, head_state& state,
           slot_scratch& work) {
  detail::expect_policy(p, state);
  merge::expect_applies(change, head, state);
  state.extend(head.length());
  traits::update_memory(p, head, state, change, work);
  merge::carry_out(change, head, state);
}

/// The same of a removal. A merge whose result the head's storage cannot hold is an eviction.
template <policy P>
void apply(const P& p, slot_removal change, const head_ref& head, head_state& state,
           slot_scratch& work) {
  detail::expect_policy(p, state);
  merge::expect_applies(change, head, state);
  merge::keep_in_range(head, change);
  state.extend(head.length());
  traits::update_memory(p, head, state, change, work);
  merge::carry_out(change, head, state);
}

/// The budget of a head that must never hold more than `slots` between steps, with the
/// policy's `eviction_batch`: it frees several slots at once, now and then.
template <policy P>
budget budget_within(const P& p, index_t slots) {
  const index_t free = std::min(traits::eviction_batch(p, slots), slots - traits::min_budget(p));
  const index_t target = std::max(slots - std::max(free, index_t{0}), index_t{1});
  return {target, budget{slots}.trigger_length()};
}

/// Throws unless `p` can hold a head of this capacity within `b`.
template <policy P>
void check(const P& p, const budget& b, index_t capacity) {
  traits::validate(p);
  if (!traits::evicts(p)) {
    return;
  }
  expects(b.slots > 0, p.name(), ": expected a budget of at least 1 slot, got ", b.slots);
  if (!traits::accepts(p, b.slots)) {
    expects(false, p.name(), ": expected a budget of at least ", traits::min_budget(p),
            " slots (protected tokens and one more), got ", b.slots);
  }
  expects(b.slots <= capacity, p.name(), ": expected a capacity of at least ", b.slots,
          " slots (the budget), got ", capacity);
  expects(b.trigger == 0 || b.trigger > b.slots, p.name(), ": expected a trigger above ", b.slots,
          " slots (the target), got ", b.trigger);
}

}  // namespace v0
}  // namespace kvmeld
