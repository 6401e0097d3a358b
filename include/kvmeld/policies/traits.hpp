// SPDX-License-Identifier: MIT
/// The facts of a policy that it may omit (see policy.hpp), with the defaults in one place, and
/// what it is refused by them: budgets, models. Of a policy chosen at run time: those of the one
/// inside.
#pragma once

#include <algorithm>  // std::max
#include <vector>

#include "kvmeld/budget.hpp"
#include "kvmeld/memory/attention_spec.hpp"
#include "kvmeld/policies/policy.hpp"

namespace kvmeld::inline v0 {
namespace detail {

/// A policy chosen at run time: `visit` calls with the one inside. It has a member for every fact.
template <class P>
concept chosen_at_run_time = requires {
  P::every();
};

/// A head without slots: what a policy protects is asked of it where no head is there yet.
inline const head_ref& empty_head() {
  static index_t none = 0;
  static const attention_spec spec{.key_dim = 1};
  static const head_ref head({.length = &none, .next_position = &none}, 0, spec, 0, storage::f32,
                             {}, {});
  return head;
}

/// Tokens that are never evicted from a head of `target` slots.
template <class P>
protection protection_of(const P& p, const head_ref& head, index_t target) {
  if constexpr (protects_tokens<const P>) {
    return p.protects(head, target);
  } else {
    return {};
  }
}

}  // namespace detail

namespace traits {

/// One float per slot each, in `head_state`.
template <class P>
std::vector<slot_stat> slot_stats(const P& p) {
  if constexpr (requires { p.slot_stats(); }) {
    const auto list = p.slot_stats();
    return {list.begin(), list.end()};
  } else {
    return {};
  }
}

/// How many of them: `columns()` of a policy whose list is not at hand.
template <class P>
index_t columns(const P& p) {
  if constexpr (detail::chosen_at_run_time<P>) {
    return p.visit([](const auto& one) { return columns(one); });
  } else if constexpr (requires { p.columns(); }) {
    return p.columns();
  } else if constexpr (requires { p.slot_stats().size(); }) {
    return static_cast<index_t>(p.slot_stats().size());
  } else {
    return 0;
  }
}

/// Floats per head beside the slots'.
template <class P>
std::size_t memory(const P& p, index_t dim, index_t group, index_t capacity) {
  if constexpr (requires { p.memory(dim, group, capacity); }) {
    return p.memory(dim, group, capacity);
  } else {
    return 0;
  }
}

/// Does the layout of the policy's memory depend on the capacity? Memory of another size for
/// another capacity does; memory of one size may too, as the policy says.
template <class P>
bool memory_follows_capacity(const P& p, index_t dim, index_t group, index_t capacity) {
  if constexpr (detail::chosen_at_run_time<P>) {
    return p.visit(
        [&](const auto& one) { return memory_follows_capacity(one, dim, group, capacity); });
  } else if constexpr (requires { P::memory_follows_capacity; }) {
    return P::memory_follows_capacity;
  } else {
    const auto size = [&](index_t slots) { return memory(p, dim, group, slots); };
    const index_t other = capacity < (1 << 20) ? 2 * capacity : capacity / 2;
    return size(capacity) != size(1) || size(capacity) != size(other);
  }
}

/// Is `target` at least `min_budget`? Known without a search for it where a policy says so, or says
/// what it protects: one more slot than that.
template <class P>
bool accepts(const P& p, index_t target) {
  if constexpr (requires { p.accepts(target); }) {
    return p.accepts(target);
  } else if constexpr (requires { p.min_budget(); }) {
    return target >= p.min_budget();
  } else {
    const protection kept = detail::protection_of(p, detail::empty_head(), target);
    return target - kept.sinks > kept.recent;
  }
}

/// The smallest target that the policy accepts.
template <class P>
index_t min_budget(const P& p) {
  if constexpr (requires { p.min_budget(); }) {
    return p.min_budget();
  } else {
    return search::least_target(1, [&](index_t target) { return accepts(p, target); });
  }
}

/// Slots better freed at once in decode, less the new token's. By default a head of 64 slots or
/// more frees 1/32 of them (docs/explanation/benchmarks.md says what other batches cost).
template <class P>
index_t eviction_batch(const P& p, index_t slots) {
  if constexpr (requires { p.eviction_batch(slots); }) {
    return p.eviction_batch(slots);
  } else {
    return std::max(slots / 32 - 1, index_t{0});
  }
}

/// Throws on parameters out of range. Here a member that has a hook's name and cannot be called as
/// that hook does not compile.
template <class P>
void validate(const P& p) {
  static_assert(detail::hooks_of<P, detail::misdeclared<P>()>::fit);
  if constexpr (requires { p.validate(); }) {
    p.validate();
  }
}

/// How the attention of a group's queries becomes one.
template <class P>
group_combine combine(const P& p) {
  if constexpr (detail::combines_by_call<const P>) {
    return p.combine();
  } else if constexpr (detail::combines_by_value<const P>) {
    return p.combine;
  } else {
    return group_combine::sum;
  }
}

/// Does the policy ever compress?
template <class P>
bool evicts(const P& p) {
  if constexpr (requires { p.evicts(); }) {
    return p.evicts();
  } else {
    return !requires { requires !P::evicts; };
  }
}

/// Does the policy compress while decoding?
template <class P>
bool supports_decode(const P& p) {
  if constexpr (requires { p.supports_decode(); }) {
    return p.supports_decode();
  } else {
    return !requires { requires !P::supports_decode; };
  }
}

/// What a model's attention may have. A plan of the policy's own may merge slots, which then have
/// no one position, and keys otherwise than values: it has to say that it does not. A mass of its
/// own is of slots that it has measured, and sealed ones are not.
template <class P>
attention_support supports(const P& p) {
  constexpr bool evicts_by_score = !detail::makes_plans<const P>;
  attention_support can{.alibi = evicts_by_score, .one_memory = evicts_by_score};
  if constexpr (detail::supports_by_call<const P>) {
    can = p.supports();
  } else if constexpr (detail::supports_by_value<const P>) {
    can = P::supports;
  }
  can.seals = can.seals && !detail::gives_mass<const P>;
  return can;
}

/// Does the policy say in one unit for all heads what of a head's slots is worth keeping?
template <class P>
bool shares(const P& p) {
  if constexpr (requires { p.shares(); }) {
    return p.shares();
  } else {
    return requires { requires P::shares; };
  }
}

/// That unit, the share of attention that each slot has: `out [length]`. Refused: a policy that
/// cannot say it (`unsupported`).
template <class P>
void shared_scores(const P& p, const head_ref& head, const head_state& state,
                   std::span<float> out) {
  if constexpr (requires { p.visit([](const auto&) {}); }) {
    p.visit([&](const auto& one) { shared_scores(one, head, state, out); });
  } else {
    expects(errc::unsupported, shares(p), p.name(),
            ": expected a policy with a score per slot for shared budgets, got one without");
    if constexpr (requires { p.shared_scores(head, state, out); }) {
      p.shared_scores(head, state, out);
    }
  }
}

/// Does the policy take a decode step's attention into its state?
template <class P>
bool uses_attention(const P& p) {
  if constexpr (requires { p.uses_attention(); }) {
    return p.uses_attention();
  } else {
    return detail::observes<const P, observation>;
  }
}

/// Does the policy plan on the reference queries themselves?
template <class P>
bool uses_queries(const P& p) {
  if constexpr (requires { p.uses_queries(); }) {
    return p.uses_queries();
  } else {
    return detail::plans_with_queries<const P>;
  }
}

/// What the policy takes of a prompt's queries; all of them where it observes any and says nothing.
template <class P>
kvmeld::prompt_use prompt_use_of(const P& p) {
  if constexpr (requires { p.prompt_use(); }) {
    return p.prompt_use();
  } else {
    return {.observes = detail::observes<const P, query_view<float>>};
  }
}

/// What the policy needs of a step's attention; all of it where it observes steps and says nothing.
template <class P>
observation_needs observation_needs_of(const P& p) {
  if constexpr (requires { p.needs(); }) {
    return p.needs();
  } else {
    const bool all = uses_attention(p);
    return {all, all, all};
  }
}

}  // namespace traits

/// What a policy needs of an engine, and what it can do: to ask before a compressor is made.
struct policy_needs {
  bool queries = false;         ///< a prompt's
  observation_needs step = {};  /// of a decode step's attention, where the engine computes its own
  bool decodes = true;          ///< does it take steps? Else prompts alone
  bool shares = false;          ///< can heads share a budget?
  attention_support attention = {};  ///< what the model's attention may have
};
template <policy P>
policy_needs needs_of(const P& p) {
  const bool decodes = traits::supports_decode(p);
  return {.queries = traits::prompt_use_of(p).needs_queries(),
          .step = decodes ? traits::observation_needs_of(p) : observation_needs(),
          .decodes = decodes,
          .shares = traits::shares(p),
          .attention = traits::supports(p)};
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

namespace detail {

/// Throws unless `p` goes with the attention of a layer; `call` begins the message.
template <policy P>
void expect_attention(const char* call, const P& p, const attention_spec& spec) {
  const attention_support can = traits::supports(p);
  const auto expect = [&](const char* what, bool is_there, bool may_be) {
    expects(errc::unsupported, !is_there || may_be, call, p.name(), ": expected attention without ",
            what, " (", can.why, "), got some");
  };
  expect("soft_cap", spec.soft_cap != 0, can.soft_cap);
  expect("sink_logits", !spec.sink_logits.empty(), can.sinks);
  expect("alibi_slopes", !spec.alibi_slopes.empty(), can.alibi);
}

/// Throws unless `p` goes with where a head has its values.
template <policy P>
void expect_memory(const char* call, const P& p, const head_ref& head) {
  expects(errc::unsupported, !head.one_memory() || traits::supports(p).one_memory, call, p.name(),
          ": expected values in memory of their own (it weights keys and values differently, or "
          "corrects them), got values in the keys' memory");
}

/// Throws unless `p` can leave the first slots of a head as they are.
template <policy P>
void expect_seals(const char* call, const P& p) {
  expects(errc::unsupported, traits::supports(p).seals, call, p.name(),
          ": expected a policy that can leave slots as they are (it keeps numbers of all slots, or "
          "moves the first ones), got one that cannot");
}

}  // namespace detail

/// Throws unless `p` goes with what a model computes in a layer (`unsupported`): which policy goes
/// with what is a table in docs/reference/policies.md.
template <policy P>
void check(const P& p, const attention_spec& spec) {
  traits::validate(p);
  detail::expect_attention("", p, spec);
}

}  // namespace kvmeld::inline v0
