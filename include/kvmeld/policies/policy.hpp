// SPDX-License-Identifier: MIT
/// What a policy is: the members that it may have, each once. Brings all types of theirs.
#pragma once

#include <algorithm>  // std::max, std::min, std::ranges::transform
#include <array>
#include <concepts>
#include <span>
#include <string_view>
#include <type_traits>  // std::is_final_v, std::is_invocable_r_v
#include <utility>      // std::forward
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
  index_t at;  ///< its number among the columns
  std::string_view name;
  slot_reduce reduce = slot_reduce::sum;  ///< how it merges
  float initial = 0;                      ///< what a fresh slot has

  /// Its number.
  constexpr operator index_t() const { return at; }  // NOLINT: where columns are counted
};

/// Of a policy that scores all slots of a head anew every so many steps of decode.
struct new_scores {
  index_t every = 0;  ///< 0: it does not
  index_t steps = 0;  ///< since it did so last

  bool are_there() const { return every > 0 && steps == 0; }  ///< has decode just scored?
  /// Are they there within fewer steps than these?
  bool within(index_t next) const { return every > 0 && every - steps < next; }
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
  bool soft_cap = true;    ///< of logits
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

template <class P, class Named>
struct with_name : P, Named {};

/// How a member that policies may have is called: one form, or two.
template <class First, class Second = First>
struct forms {
  using first = First;
  using second = Second;
};

/// A member that a policy may have, by name: how it is called, and the call. Where `P` has a member
/// of the name, whatever it is, the name is ambiguous in `with_name`. Of a final class nothing is
/// known.
#define KVMELD_HOOK(member, ...)                                                         \
  struct member##_hook {                                                                 \
    using called_as = forms<__VA_ARGS__>;                                                \
    template <class P, class... X>                                                       \
    auto operator()(P& p, X&&... x) const -> decltype(p.member(std::forward<X>(x)...)) { \
      return p.member(std::forward<X>(x)...);                                            \
    }                                                                                    \
    struct named {                                                                       \
      int member;                                                                        \
    };                                                                                   \
    template <class P>                                                                   \
    using probe = std::conditional_t<std::is_final_v<P>, named, with_name<P, named>>;    \
    template <class P>                                                                   \
    static constexpr bool is_member = !requires {                                        \
      &probe<P>::member;                                                                 \
    };                                                                                   \
  }

// Two members are all that a policy takes, a name and a score or a plan.

/// Evicts: the slots of the highest score stay. A double, or a pair that ties are broken by, is not
/// ranked: no NaN.
KVMELD_HOOK(score, void(const head_ref& head, const head_state& state, index_t slot));
/// Pure: it reads the head and the state, and writes at most `target` rows into `out` (called only
/// where the head holds more than `target` slots). `work` is memory to work in. Or on the
/// prompt's reference queries themselves.
KVMELD_HOOK(plan,
            void(const head_ref& head, const head_state& state, index_t target, slot_scratch& work,
                 merge_plan& out),
            void(const head_ref& head, const head_state& state, const query_view<float>& queries,
                 index_t target, slot_scratch& work, merge_plan& out));
/// Sinks and latest tokens that stay whatever their score; default none. Asked of an empty head
/// too. The plan of a score follows, and the least budget.
KVMELD_HOOK(protects, protection(const head_ref& head, index_t target));

// What may be set is a tuple `options` (options.hpp), and:

/// Throws on options that do not go together.
KVMELD_HOOK(validate, void());

// Its state, and the budgets that it needs.

/// `static constexpr std::array columns{attention}`: a float per slot each, in `head_state`.
KVMELD_HOOK(columns, void());
/// The first of `columns`, where options decide.
KVMELD_HOOK(columns_used, std::span<const column>());
/// The same where options say more than that, a range of `slot_stat`.
KVMELD_HOOK(slot_stats, void());
/// How many these are.
KVMELD_HOOK(column_count, index_t());
/// Floats per head in addition to the slots'. `dim`: of keys or values, the larger.
KVMELD_HOOK(memory, std::size_t(index_t dim, index_t group, index_t capacity));
/// Does `memory` mean something else for another capacity, where its size is the same? Then states
/// of other capacities are not copied.
KVMELD_HOOK(memory_follows_capacity, bool());
/// The smallest target; default one more than is protected.
KVMELD_HOOK(min_budget, index_t());
/// Is `target` at least `min_budget`? Where it is known without a search.
KVMELD_HOOK(accepts, bool(index_t target));
/// Slots better freed at once in decode, less the new token's; default 1/32 in all.
KVMELD_HOOK(eviction_batch, index_t(index_t slots));
/// False: never compresses (full_cache).
KVMELD_HOOK(evicts, bool());
/// False: compresses prompts only.
KVMELD_HOOK(supports_decode, bool());

// How heads share slots.

/// Can it say, in the one unit that all heads have, which slots are worth keeping?
KVMELD_HOOK(shares, bool());
/// `out [length]`: the share of attention, in [0, 1], that each slot has. Those of the highest over
/// all heads stay.
KVMELD_HOOK(shared_scores,
            void(const head_ref& head, const head_state& state, std::span<float> out));

/// When decode gives all slots new scores, by which heads share slots anew; default never.
KVMELD_HOOK(new_scores, kvmeld::new_scores(const head_ref& head, const head_state& state));

/// Which models it is for. Default: all that there is with a score, with a plan of its own all but
/// `alibi` and `one_memory`.
KVMELD_HOOK(supports, attention_support());

// What it measures.

/// How the attention of a group's queries becomes one: a member, or a function; default the sum.
KVMELD_HOOK(combine, group_combine());
/// What it takes of a step's attention; default all of it where it observes steps.
KVMELD_HOOK(needs, observation_needs());
/// Does it observe steps? Where it has a form for these that it may not use.
KVMELD_HOOK(uses_attention, bool());
/// What it takes of a prompt's queries; default all of them where it observes any.
KVMELD_HOOK(prompt_use, kvmeld::prompt_use());
/// One decode step's attention, or reference queries. Refuses what it cannot do without before it
/// changes the state.
KVMELD_HOOK(observe, void(const head_ref& head, head_state& state, const observation& seen),
            void(const head_ref& head, head_state& state, const query_view<float>& seen));

// How it decodes.

/// What of its state a plan needs while no prompt is open; default all that it observes.
KVMELD_HOOK(decode_use, kvmeld::decode_use());
/// Takes `memory` along before a plan is applied.
KVMELD_HOOK(update_memory, void(const head_ref& head, head_state& state, const merge_plan& change,
                                slot_scratch& work));
/// After every return to the budget.
KVMELD_HOOK(after_compress, void(const head_ref& head, head_state& state, index_t target));
/// (slot, q·k) ↦ logit, if not scale · q·k + log-mass; (slot, q·k, q), if it can take the query
/// too.
KVMELD_HOOK(mass, void(const head_ref& head, const head_state& state));

#undef KVMELD_HOOK

template <class P, class Hook, class R, class... X>
consteval bool is_called(R (*)(X...)) {
  return std::is_invocable_r_v<R, Hook, P&, X...>;
}
template <class P, class Hook, class Signature>
concept has = is_called<P, Hook>(static_cast<Signature*>(nullptr));

template <class Hook>
using first_form = typename Hook::called_as::first;
template <class Hook>
using second_form = typename Hook::called_as::second;
template <class R, class... X>
R result(R (*)(X...));
template <class Hook>
using result_of = decltype(result(static_cast<first_form<Hook>*>(nullptr)));

template <class P>
concept scores_slots = has<P, score_hook, first_form<score_hook>>;
template <class P>
concept makes_plans = has<P, plan_hook, first_form<plan_hook>>;
template <class P>
concept plans_with_queries = has<P, plan_hook, second_form<plan_hook>>;
template <class P>
concept gives_mass = has<P, mass_hook, first_form<mass_hook>>;
template <class P>
concept observes_steps = has<P, observe_hook, first_form<observe_hook>>;
template <class P>
concept observes_queries = has<P, observe_hook, second_form<observe_hook>>;

/// Can a member of `P` of this name be called as the hook is? One that cannot would be ignored, as
/// would a form that only a policy that is not const has.
template <class P, class Hook>
consteval bool is_well_declared() {
  using first = first_form<Hook>;
  using second = second_form<Hook>;
  return (!Hook::template is_member<P> || has<const P, Hook, first> ||
          has<const P, Hook, second>)&&has<P, Hook, first> == has<const P, Hook, first> &&
         has<P, Hook, second> == has<const P, Hook, second>;
}
template <class P, class... Hooks>
consteval bool are_well_declared() {
  return (is_well_declared<P, Hooks>() && ...);
}
template <class P>
consteval bool well_declared() {
  const bool functions = are_well_declared<
      P, plan_hook, protects_hook, validate_hook, columns_used_hook, column_count_hook, memory_hook,
      memory_follows_capacity_hook, min_budget_hook, accepts_hook, eviction_batch_hook, evicts_hook,
      supports_decode_hook, shares_hook, shared_scores_hook, new_scores_hook, supports_hook,
      needs_hook, uses_attention_hook, prompt_use_hook, observe_hook, decode_use_hook,
      update_memory_hook, after_compress_hook, mass_hook>();
  const bool columns =
      (!columns_hook::is_member<P> || requires { std::span<const column>(P::columns); }) &&
      (!slot_stats_hook::is_member<P> || requires(const P& p) { p.slot_stats().size(); });
  const bool combines = is_well_declared<P, combine_hook>() || requires(const P& p) {
    { p.combine } -> std::convertible_to<group_combine>;
  };
  return functions && columns && combines &&
         (makes_plans<const P> || is_well_declared<P, score_hook>());
}

}  // namespace detail

/// A KV-cache compression policy: a small value that makes plans. A name, and a score or a plan,
/// are all that it needs:
///
///     static constexpr std::string_view name();
///     float score(const head_ref& head, const head_state& state, index_t slot) const;
///
/// The rest is optional: the hooks above are the members that it may have, each const, and
/// `declared` has their defaults. A head may be taken as `const kv_head auto&` too. A member of
/// such a name that cannot be called so does not compile.
template <class P>
concept policy = std::copyable<P> &&
    (detail::makes_plans<const P> || detail::scores_slots<const P> ||
     detail::chosen_at_run_time<P>)&&requires(const P& p) {
  { p.name() } -> std::convertible_to<std::string_view>;
};

}  // namespace kvmeld::inline v0
