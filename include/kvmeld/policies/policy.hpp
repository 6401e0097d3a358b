// SPDX-License-Identifier: MIT
/// What a policy is: two members, and what it may add to them. Brings all types of its members.
#pragma once

#include <algorithm>  // std::max, std::min, std::ranges::transform
#include <array>
#include <concepts>
#include <span>
#include <string_view>
#include <type_traits>  // std::is_final_v
#include <vector>

#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/merge/plan.hpp"
#include "kvmeld/merge/rows.hpp"
#include "kvmeld/policies/options.hpp"
#include "kvmeld/score/observation.hpp"
#include "kvmeld/score/queries.hpp"
#include "kvmeld/search/rules.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld::inline v0 {

/// A float per slot that a policy keeps. It stands for its number among the policy's `columns`:
/// `state.column(attention)`.
struct column {
  index_t at;
  std::string_view name;
  slot_reduce reduce = slot_reduce::sum;
  float initial = 0;

  constexpr operator index_t() const { return at; }  // NOLINT: where columns are counted
};

/// A policy's columns as states have them.
template <class P>
std::vector<slot_stat> slot_stats_of(const P& p) {
  std::vector<slot_stat> all;
  if constexpr (requires { p.slot_stats(); }) {
    const auto own = p.slot_stats();
    all.assign(own.begin(), own.end());
  } else if constexpr (requires { P::columns; }) {
    const auto used = [&]() -> std::span<const column> {
      if constexpr (requires { p.columns_used(); }) {
        return p.columns_used();
      } else {
        return P::columns;
      }
    }();
    for (const column& c : used) {
      all.push_back({c.reduce, c.initial});
    }
  }
  return all;
}

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
concept gives_mass = requires(P& p, hook_arguments& x) {
  p.mass(x.head, x.held);
};
template <class P, class Seen>
concept observes = requires(P& p, hook_arguments& x, const Seen& seen) {
  p.observe(x.head, x.state, seen);
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
/// rest is optional; `declared` has the defaults. A member of these names that cannot be called so
/// (one that is not const, say) does not compile.
///
/// What may be set, each with its range and meaning (options.hpp); what these make together:
///
///     static constexpr std::tuple options{option("sinks", &own::sinks, 0, any_count, "...")};
///     void validate() const;                            throws on options that do not go together
///
/// Its state, and the budgets that it needs:
///
///     static constexpr column attention{0, "attention"};
///     static constexpr std::array columns{attention};   one float per slot each, in `head_state`
///     std::span<const column> columns_used() const;     the first of them, where options decide
///     std::vector<slot_stat> slot_stats() const;        the same where options say more than that
///     index_t column_count() const;                     how many these are, without a list
///     std::size_t memory(index_t dim, index_t group, index_t capacity) const;
///                                                       floats per head in addition to the slots';
///                                                       `dim`: of keys or values, the larger
///     static bool memory_follows_capacity();            does `memory` mean something else for
///                                                       another capacity, where its size is the
///                                                       same? Then states of other capacities
///                                                       are not copied
///     index_t min_budget() const;                       smallest target; default one more than is
///                                                       protected
///     bool accepts(index_t target) const;               is it at least that? Where it is known
///                                                       without a search
///     index_t eviction_batch(index_t slots) const;      slots better freed at once in decode, less
///                                                       the new token's; default 1/32 in all
///     bool evicts() const;                              false: never compresses (full_cache)
///     bool supports_decode() const;                     false: compresses prompts only
///
/// How heads share slots, if it can say it in the one unit that all heads have:
///
///     bool shares() const;
///     void shared_scores(const kv_head auto& head, const head_state& state,
///                        std::span<float> out) const;   [length], the share of attention, in
///                                                       [0, 1], that each slot has: those of the
///                                                       highest over all heads stay
///
/// Which models it is for:
///
///     attention_support supports() const;               default: all that there is with a score,
///                                                       with a plan of its own all but `alibi` and
///                                                       `one_memory`
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
///                                                       applied
///     void after_compress(const kv_head auto& head, head_state&, index_t target) const;
///                                                       after every return to the budget
///     auto mass(const kv_head auto& head, const head_state&) const;
///                                                       (slot, q·k) ↦ logit, if not scale · q·k +
///                                                       log-mass; (slot, q·k, q), if it can take
///                                                       the query too
template <class P>
concept policy = std::copyable<P> &&
    (detail::makes_plans<const P> || detail::scores_slots<const P> ||
     detail::chosen_at_run_time<P>)&&requires(const P& p) {
  { p.name() } -> std::convertible_to<std::string_view>;
};

namespace detail {

/// The optional members of a policy, and those that have several forms.
struct hook_names {
  int columns, columns_used, column_count, slot_stats, memory, accepts, min_budget, eviction_batch,
      validate, evicts, supports_decode, shares, shared_scores, supports, combine, needs,
      prompt_use, protects, observe, plan, update_memory, after_compress, mass, score;
};
/// Where `P` has a member of such a name, whatever it is, the name is ambiguous here.
template <class P>
struct with_hook_names : P, hook_names {};

/// Can every member of `P` that has the name of a hook be called as the hook is? One that cannot
/// would be ignored. Of a final class nothing is known.
template <class P>
consteval bool well_declared() {
  using C = const P;
  using N = std::conditional_t<std::is_final_v<P>, hook_names, with_hook_names<P>>;
  using step = observation;
  using reference = query_view<float>;
  bool fits = true;
  const auto expect = [&](bool is_not_there, bool is_hook) {
    fits = fits && (is_not_there || is_hook);
  };
  expect(
      requires { &N::slot_stats; }, requires(C & p) { p.slot_stats().size(); });
  expect(
      requires { &N::columns; }, requires { std::span<const column>(P::columns); });
  expect(
      requires { &N::columns_used; },
      requires(C & p) { std::span<const column>(p.columns_used()); });
  expect(
      requires { &N::column_count; }, requires(C & p) { index_t{p.column_count()}; });
  expect(
      requires { &N::memory; }, requires(C & p, index_t n) { p.memory(n, n, n); });
  expect(
      requires { &N::accepts; }, requires(C & p, index_t n) { bool{p.accepts(n)}; });
  expect(
      requires { &N::min_budget; }, requires(C & p) { index_t{p.min_budget()}; });
  expect(
      requires { &N::eviction_batch; },
      requires(C & p, index_t n) { index_t{p.eviction_batch(n)}; });
  expect(
      requires { &N::validate; }, requires(C & p) { p.validate(); });
  expect(
      requires { &N::evicts; }, requires(C & p) { bool{p.evicts()}; });
  expect(
      requires { &N::supports_decode; }, requires(C & p) { bool{p.supports_decode()}; });
  expect(
      requires { &N::shares; }, requires(C & p) { bool{p.shares()}; });
  expect(
      requires { &N::shared_scores; },
      requires(C & p, hook_arguments & x, std::span<float> s) {
        p.shared_scores(x.head, x.held, s);
      });
  expect(
      requires { &N::supports; }, requires(C & p) { attention_support{p.supports()}; });
  expect(
      requires { &N::needs; }, requires(C & p) { observation_needs{p.needs()}; });
  expect(
      requires { &N::prompt_use; }, requires(C & p) { prompt_use{p.prompt_use()}; });
  expect(
      requires { &N::protects; },
      requires(C & p, hook_arguments & x) { protection{p.protects(x.head, x.n)}; });
  expect(
      requires { &N::update_memory; },
      requires(C & p, hook_arguments & x) { p.update_memory(x.head, x.state, x.out, x.work); });
  expect(
      requires { &N::after_compress; },
      requires(C & p, hook_arguments & x) { p.after_compress(x.head, x.state, x.n); });
  expect(
      requires { &N::mass; }, gives_mass<C>);
  expect(
      requires { &N::score; }, scores_slots<C> || makes_plans<C>);
  expect(
      requires { &N::observe; }, observes<C, step> || observes<C, reference>);
  expect(
      requires { &N::combine; },
      requires(C & p) {
        { p.combine } -> std::convertible_to<group_combine>;
      } ||
          requires(C & p) {
            { p.combine() } -> std::convertible_to<group_combine>;
          });
  // Where there are two forms, one that only a policy that is not const has is ignored as well.
  return fits && observes<P, step> == observes<C, step> &&
         observes<P, reference> == observes<C, reference> &&
         plans_with_queries<P> == plans_with_queries<C>;
}

}  // namespace detail
}  // namespace kvmeld::inline v0
