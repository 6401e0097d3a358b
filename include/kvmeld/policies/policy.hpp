// SPDX-License-Identifier: MIT
/// What a policy is: two members, and what it may add to them. Brings all types of its members.
#pragma once

#include <algorithm>  // std::max, std::min, std::ranges::transform
#include <array>
#include <concepts>
#include <span>
#include <string_view>
#include <type_traits>  // std::is_final_v

#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/merge/plan.hpp"
#include "kvmeld/merge/rows.hpp"
#include "kvmeld/score/observation.hpp"
#include "kvmeld/score/queries.hpp"
#include "kvmeld/search/protection.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld::inline v0 {

/// What a model's attention may have for a policy to be right.
struct attention_support {
  bool soft_cap = true;
  bool sinks = true;       ///< `sink_logits`
  bool alibi = true;       ///< `alibi_slopes`
  bool one_memory = true;  ///< values in the memory of keys, as latent attention keeps them
  bool seals = true;       ///< slots before its own that stay; never with a `mass` of its own
  /// Why it does not go with a cap, sinks or slopes.
  std::string_view why = "it merges slots";
};

namespace score {

/// `out [length] ← column / whole`: the share of attention that a slot has of all that `queries`
/// queries could give. A `sum` over a group is that of its heads.
inline void write_shares(std::span<const float> column, group_combine combine, index_t group,
                         double queries, std::span<float> out) {
  const double whole = std::max(queries, 1.0) * (combine == group_combine::sum ? group : 1);
  std::ranges::transform(column, out.begin(),
                         [&](float x) { return static_cast<float>(double{x} / whole); });
}

/// Queries in a window that counts as past + current, where `current` have been counted since.
inline double queries_in_window(const head_state& state, index_t window, float current) {
  return std::min(static_cast<double>(state.observed()),
                  static_cast<double>(window) + double{current});
}

}  // namespace score

namespace detail {

/// What the members of a policy are called with.
struct hook_arguments {
  const head_ref& head;
  head_state& state;
  const head_state& held;
  slot_scratch& work;
  merge_plan& out;
  const query_view<float>& queries;
  index_t n;
};

template <class P>
concept protects_tokens = requires(P& p, hook_arguments& x) {
  { p.protects(x.head, x.n) } -> std::convertible_to<protection>;
};
template <class P>
concept scores_slots = requires(P& p, hook_arguments& x) {
  p.score(x.head, x.held, x.n);
};
template <class P>
concept makes_plans = requires(P& p, hook_arguments& x) {
  p.plan(x.head, x.held, x.n, x.work, x.out);
};
template <class P>
concept plans_with_queries = requires(P& p, hook_arguments& x) {
  p.plan(x.head, x.held, x.queries, x.n, x.work, x.out);
};
template <class P>
concept combines_by_value = requires(P& p) {
  { p.combine } -> std::convertible_to<group_combine>;
};
template <class P>
concept combines_by_call = requires(P& p) {
  { p.combine() } -> std::convertible_to<group_combine>;
};
template <class P>
concept supports_by_value = requires {
  { P::supports } -> std::convertible_to<attention_support>;
};
template <class P>
concept supports_by_call = requires(P& p) {
  { p.supports() } -> std::convertible_to<attention_support>;
};
template <class P>
concept gives_mass = requires(P& p, hook_arguments& x) {
  p.mass(x.head, x.held);
};
template <class P, class Seen>
concept observes = requires(P& p, hook_arguments& x, const Seen& seen) {
  p.observe(x.head, x.state, seen);
};
template <class P>
concept updates_memory = requires(P& p, hook_arguments& x) {
  p.update_memory(x.head, x.state, x.out, x.work);
};

}  // namespace detail

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
///                                                       empty head too. The plan and the least
///                                                       budget follow from these
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
///     std::array<slot_stat, n> slot_stats() const;      one float per slot each, in `head_state`
///     std::size_t memory(index_t dim, index_t group, index_t capacity) const;
///                                                       floats per head beside the slots'; `dim`:
///                                                       of keys or values, the larger
///     static constexpr bool memory_follows_capacity = true;
///                                                       does `memory` mean something else for
///                                                       another capacity, where its size is the
///                                                       same? Then states of other capacities
///                                                       are not copied
///     index_t min_budget() const;                       smallest target; default one more than is
///                                                       protected
///     bool accepts(index_t target) const;               is it at least that? Where it is known
///                                                       without a search
///     index_t eviction_batch(index_t slots) const;      slots better freed at once in decode, less
///                                                       the new token's; default 1/32 in all
///     void validate() const;                            throws on parameters out of range
///     static void parameters(auto& p, auto f);          f(name, p's member) for each that
///                                                       `make_policy` may set
///     static constexpr bool evicts = false;             never compresses (full_cache)
///     static constexpr bool supports_decode = false;    compresses prompts only
///
/// How heads share slots, if it can say it in the one unit that all heads have:
///
///     static constexpr bool shares = true;
///     void shared_scores(const kv_head auto& head, const head_state& state,
///                        std::span<float> out) const;   [length], the share of attention, in
///                                                       [0, 1], that each slot has: those of the
///                                                       highest over all heads stay
///
/// Which models it is for:
///
///     static constexpr attention_support supports{...}; or a member function; default: all that
///                                                       there is with a score, with a plan of its
///                                                       own all but `alibi` and `one_memory`
///
/// What it measures:
///
///     group_combine combine;                            of the group's attention; default sum
///     observation_needs needs() const;                  of a step's attention; default all of it
///     kvmeld::prompt_use prompt_use() const;            of a prompt's queries; default all of them
///     void observe(const kv_head auto& head, head_state&, const observation&) const;
///                                                       one decode step's; refuses what it cannot
///                                                       do without before it changes the state
///     void observe(const kv_head auto& head, head_state&, const query_view<float>&) const;
///                                                       reference queries'
///     void plan(const kv_head auto& head, const head_state&, const query_view<float>& queries,
///               index_t target, slot_scratch& work, merge_plan& out) const;
///                                                       on the reference queries themselves
///
/// How it decodes:
///
///     void update_memory(const kv_head auto& head, head_state&, const merge_plan& change,
///                        slot_scratch&) const;          takes `memory` along before a plan is
///                                                       applied, which fits
///     void after_compress(const kv_head auto& head, head_state&, index_t target) const;
///                                                       after every return to the budget
///     auto mass(const kv_head auto& head, const head_state&) const;
///                                                       (slot, q·k) ↦ logit, if not scale · q·k +
///                                                       log-mass; (slot, q·k, q), if it can take
///                                                       the query too
template <class P>
concept policy = std::copyable<P> &&
    (detail::makes_plans<const P> || detail::scores_slots<const P>)&&requires(const P& p) {
  { p.name() } -> std::convertible_to<std::string_view>;
};

namespace detail {

/// The optional members of a policy, and `plan`, which may have a form with queries.
struct hook_names {
  int slot_stats, memory, min_budget, eviction_batch, validate, combine, protects, observe, plan,
      update_memory, after_compress, mass, supports;
};
/// Where `P` has a member of such a name, whatever it is, the name is ambiguous here.
template <class P>
struct with_hook_names : P, hook_names {};

/// The first hook that `P` means to have and has not: a member of its name that cannot be called as
/// the hook is would be ignored otherwise. Null if all is well; of a final class nothing is known.
template <class P>
consteval int hook_names::*misdeclared() {
  using C = const P;
  using names = std::conditional_t<std::is_final_v<P>, hook_names, with_hook_names<P>>;
  using step = observation;
  using reference = query_view<float>;
  int hook_names::*found = nullptr;
  const auto expect = [&](int hook_names::*hook, bool is_there, bool fits) {
    found = found == nullptr && is_there && !fits ? hook : found;
  };
  expect(
      &hook_names::slot_stats, !requires { &names::slot_stats; },
      requires(C & p) { p.slot_stats().size(); });
  expect(
      &hook_names::memory, !requires { &names::memory; },
      requires(C & p, index_t n) { p.memory(n, n, n); });
  expect(
      &hook_names::min_budget, !requires { &names::min_budget; },
      requires(C & p) { index_t{p.min_budget()}; });
  expect(
      &hook_names::eviction_batch, !requires { &names::eviction_batch; },
      requires(C & p, index_t n) { index_t{p.eviction_batch(n)}; });
  expect(
      &hook_names::validate, !requires { &names::validate; }, requires(C & p) { p.validate(); });
  expect(
      &hook_names::combine, !requires { &names::combine; },
      combines_by_value<C> || combines_by_call<C>);
  expect(
      &hook_names::protects, !requires { &names::protects; }, protects_tokens<C>);
  // Where there are two forms, one that only a policy that is not const has is ignored as well.
  expect(
      &hook_names::observe, !requires { &names::observe; },
      observes<C, step> || observes<C, reference>);
  expect(
      &hook_names::observe, true,
      observes<P, step> == observes<C, step> && observes<P, reference> == observes<C, reference>);
  expect(&hook_names::plan, true, plans_with_queries<P> == plans_with_queries<C>);
  expect(
      &hook_names::update_memory, !requires { &names::update_memory; }, updates_memory<C>);
  expect(
      &hook_names::after_compress, !requires { &names::after_compress; },
      requires(C & p, hook_arguments & x) { p.after_compress(x.head, x.state, x.n); });
  expect(
      &hook_names::mass, !requires { &names::mass; }, gives_mass<C>);
  expect(
      &hook_names::supports, !requires { &names::supports; },
      supports_by_value<C> || supports_by_call<C>);
  return found;
}

/// The compiler's message names the hook.
template <class P, int hook_names::*misdeclared_hook>
struct hooks_of {
  static_assert(
      misdeclared_hook == nullptr,
      "kvmeld: expected a policy's member with a hook's name to be const and to take the arguments "
      "of policy.hpp");
  static constexpr bool fit = true;
};

}  // namespace detail
}  // namespace kvmeld::inline v0
