// SPDX-License-Identifier: MIT
/// A policy with a default for every member that it omits, and its plan, carried out.
#pragma once

#include <algorithm>  // std::min, std::max
#include <concepts>   // std::same_as
#include <string>
#include <vector>

#include "kvmeld/budget.hpp"
#include "kvmeld/memory/attention_spec.hpp"
#include "kvmeld/merge/apply.hpp"
#include "kvmeld/merge/merge_rows.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/attention.hpp"

namespace kvmeld::inline v0 {
namespace detail {

/// A head without slots: what a policy protects is asked of it where no head is there yet.
inline const head_ref& empty_head() {
  static index_t none = 0;
  static const attention_spec spec{.key_dim = 1};
  static const head_ref head({.length = &none, .next_position = &none}, 0, spec, 0, storage::f32,
                             {}, {});
  return head;
}

/// The default of a member that does something.
struct nothing {
  void operator()(const auto&) const {}
};

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

/// `declared(policy).memory(...)`: what `policy` says, or the default where it says nothing; of a
/// policy chosen at run time, what the one inside says. The one place that knows the defaults.
/// `kvmeld::compiled` has what is defined outside of the class.
template <class P>
class declared {
 public:
  explicit declared(const P& policy) : p_(policy) {}  ///< `policy` has to live as long.

  /// Throws on options out of range, or that do not go together.
  void validate() const {
    static_assert(
        detail::well_declared<P>(),
        "kvmeld: expected a policy's member with a hook's name to be const and to take the "
        "arguments of policy.hpp");
    kvmeld::validate(p_);
  }
  /// As `make_policy` reads it.
  std::string text() const { return kvmeld::text(p_); }
  /// Are all options the same? Memory of the caller's, as `kvzip::output`, is none.
  bool operator==(const declared& other) const { return text() == other.text(); }

  std::vector<slot_stat> slot_stats() const {
    return inside([](const auto& p) { return slot_stats_of(p); });
  }
  /// How many of them, without a list.
  index_t columns() const {
    return ask<detail::column_count_hook>([]<class Q>(const declared<Q>& p) -> index_t {
      if constexpr (requires { p.p_.columns_used(); }) {
        return static_cast<index_t>(p.p_.columns_used().size());
      } else if constexpr (requires { Q::columns; }) {
        return static_cast<index_t>(Q::columns.size());
      } else {
        return static_cast<index_t>(p.slot_stats().size());
      }
    });
  }
  std::size_t memory(index_t dim, index_t group, index_t capacity) const {
    return ask<detail::memory_hook>(std::size_t{0}, dim, group, capacity);
  }
  /// Does the layout of the policy's memory depend on the capacity? Memory of another size for
  /// another capacity does; memory of one size may too, as the policy says.
  bool memory_follows_capacity(index_t dim, index_t group, index_t capacity) const {
    return ask<detail::memory_follows_capacity_hook>([&](const auto& p) {
      const index_t other = capacity < (1 << 20) ? 2 * capacity : capacity / 2;
      const std::size_t size = p.memory(dim, group, capacity);
      return size != p.memory(dim, group, 1) || size != p.memory(dim, group, other);
    });
  }
  /// Tokens that are never evicted from a head of `target` slots.
  protection protects(const head_ref& head, index_t target) const {
    return ask<detail::protects_hook>(protection(), head, target);
  }
  bool accepts(index_t target) const {
    return ask<detail::accepts_hook>(
        [&](const auto& p) {
          if constexpr (requires { p.p_.min_budget(); }) {
            return target >= p.p_.min_budget();
          } else {
            const protection kept = p.protects(detail::empty_head(), target);
            return target - kept.sinks > kept.recent;
          }
        },
        target);
  }
  /// The smallest target that the policy accepts.
  index_t min_budget() const {
    return ask<detail::min_budget_hook>([](const auto& p) {
      return search::least_target(1, [&](index_t target) { return p.accepts(target); });
    });
  }
  /// Slots better freed at once in decode, less the new token's. By default a head of 64 slots or
  /// more frees 1/32 of them (docs/explanation/benchmarks.md says what other batches cost).
  index_t eviction_batch(index_t slots) const {
    return ask<detail::eviction_batch_hook>(std::max(slots / 32 - 1, index_t{0}), slots);
  }
  bool evicts() const { return ask<detail::evicts_hook>(true); }
  bool supports_decode() const { return ask<detail::supports_decode_hook>(true); }
  /// How the attention of a group's queries becomes one.
  group_combine combine() const {
    return ask<detail::combine_hook>([](const auto& p) {
      if constexpr (requires { p.p_.combine; }) {
        return p.p_.combine;
      } else {
        return group_combine::sum;
      }
    });
  }
  /// What a model's attention may have. A plan of the policy's own may merge slots, which then have
  /// no one position, and keys otherwise than values: it has to say that it does not. A mass of its
  /// own is of slots that it has measured, and sealed ones are not.
  attention_support supports() const {
    return inside([]<class Q>(const Q& p) {
      constexpr bool by_score = !detail::makes_plans<const Q>;
      auto can = kvmeld::declared(p).template ask<detail::supports_hook>(
          attention_support{.alibi = by_score, .one_memory = by_score});
      can.seals = can.seals && !detail::gives_mass<const Q>;
      return can;
    });
  }
  /// Does it say in one unit for all heads what of a head's slots is worth keeping?
  bool shares() const { return ask<detail::shares_hook>(false); }
  /// That unit, the share of attention that each slot has: `out [length]`. Refused: a policy that
  /// cannot say it (`unsupported`).
  void shared_scores(const head_ref& head, const head_state& state, std::span<float> out) const {
    expects(errc::unsupported, shares(), p_.name(),
            ": expected a policy with a score per slot for shared budgets, got one without");
    ask<detail::shared_scores_hook>(detail::nothing(), head, state, out);
  }
  /// When decode gives all slots new scores.
  kvmeld::new_scores new_scores(const head_ref& head, const head_state& state) const {
    return ask<detail::new_scores_hook>(kvmeld::new_scores(), head, state);
  }
  /// Does it take a decode step's attention into its state?
  bool uses_attention() const {
    return ask<detail::uses_attention_hook>(
        []<class Q>(const declared<Q>&) { return detail::observes_steps<const Q>; });
  }
  /// Does it plan on the reference queries themselves?
  bool uses_queries() const {
    return inside([]<class Q>(const Q&) { return detail::plans_with_queries<const Q>; });
  }
  /// What it takes of a prompt's queries.
  kvmeld::prompt_use prompt_use() const {
    return ask<detail::prompt_use_hook>([]<class Q>(const declared<Q>&) {
      return kvmeld::prompt_use{.observes = detail::observes_queries<const Q>};
    });
  }
  /// What a plan of decode needs of earlier steps.
  kvmeld::decode_use decode_use() const {
    return ask<detail::decode_use_hook>(kvmeld::decode_use());
  }
  /// What it needs of a step's attention.
  observation_needs needs() const {
    return ask<detail::needs_hook>([](const auto& p) {
      const bool all = p.uses_attention();
      return observation_needs{all, all, all};
    });
  }

  /// One decode step's attention, or reference queries.
  /// @{
  void observe(const head_ref& head, head_state& state, const observation& seen) const;
  void observe(const head_ref& head, head_state& state, const query_view<float>& seen) const;
  /// @}
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
  template <class Q>
  friend class declared;
  static constexpr bool at_run_time = detail::chosen_at_run_time<P>;

  decltype(auto) inside(const auto& f) const {
    if constexpr (at_run_time) {
      return p_.visit(f);
    } else {
      return f(p_);
    }
  }
  /// What the policy's own member says, where it has one; else `otherwise`, a value or a function
  /// of what is declared.
  template <class Hook>
  auto ask(const auto& otherwise, auto&&... x) const {
    return inside(
        [&](const auto& p) -> detail::result_of<Hook> { return answer<Hook>(p, otherwise, x...); });
  }
  template <class Hook, class Q>
  static auto answer(const Q& p, const auto& otherwise, auto&... x) -> detail::result_of<Hook> {
    if constexpr (std::is_invocable_v<Hook, const Q&, decltype(x)...>) {
      return Hook()(p, x...);
    } else if constexpr (std::is_invocable_v<decltype(otherwise), const declared<Q>&>) {
      return otherwise(kvmeld::declared(p));
    } else {
      return otherwise;
    }
  }

  const P& p_;
};

template <class P>
void declared<P>::observe(const head_ref& head, head_state& state, const observation& seen) const {
  if constexpr (at_run_time) {
    p_.visit([&](const auto& one) { kvmeld::declared(one).observe(head, state, seen); });
  } else {
    ask<detail::observe_hook>(detail::nothing(), head, state, seen);
  }
}
template <class P>
void declared<P>::observe(const head_ref& head, head_state& state,
                          const query_view<float>& seen) const {
  if constexpr (at_run_time) {
    p_.visit([&](const auto& one) { kvmeld::declared(one).observe(head, state, seen); });
  } else {
    ask<detail::observe_hook>(detail::nothing(), head, state, seen);
  }
}

template <class P>
void declared<P>::plan(const head_ref& head, const head_state& state,
                       const query_view<float>& queries, index_t target, slot_scratch& work,
                       merge_plan& out) const {
  if constexpr (at_run_time) {
    return p_.visit([&](const auto& one) {
      kvmeld::declared(one).plan(head, state, queries, target, work, out);
    });
  } else {
    if constexpr (detail::plans_with_queries<const P>) {
      if (queries.count > 0) {
        return p_.plan(head, state, queries, target, work, out);
      }
    }
    if constexpr (detail::makes_plans<const P>) {
      p_.plan(head, state, target, work, out);
    } else {
      evict(head, target, protected_slots(head, protects(head, target)),
            detail::score_of(p_, head, state), work, out);
    }
  }
}

template <class P>
void declared<P>::update_memory(const head_ref& head, head_state& state, const merge_plan& change,
                                slot_scratch& work) const {
  if constexpr (at_run_time) {
    p_.visit(
        [&](const auto& one) { kvmeld::declared(one).update_memory(head, state, change, work); });
  } else {
    ask<detail::update_memory_hook>(detail::nothing(), head, state, change, work);
  }
}

template <class P>
void declared<P>::after_compress(const head_ref& head, head_state& state, index_t target) const {
  if constexpr (at_run_time) {
    p_.visit([&](const auto& one) { kvmeld::declared(one).after_compress(head, state, target); });
  } else {
    ask<detail::after_compress_hook>(detail::nothing(), head, state, target);
  }
}

template <class P>
void declared<P>::attend(const head_ref& head, const head_state& state, const float* q, float* out,
                         std::span<float> probabilities, std::span<float> log_sum_exp) const {
  if constexpr (at_run_time) {
    p_.visit([&](const auto& one) {
      kvmeld::declared(one).attend(head, state, q, out, probabilities, log_sum_exp);
    });
  } else if constexpr (requires { p_.mass(head, state); }) {
    kvmeld::attend(head, p_.mass(head, state), q, out, probabilities, log_sum_exp);
  } else {
    kvmeld::attend(head, log_mass_of{head}, q, out, probabilities, log_sum_exp);
  }
}

/// What a policy needs of an engine, and what it can do: to ask before a compressor is made.
struct policy_needs {
  bool queries = false;         ///< a prompt's
  observation_needs step = {};  ///< of a decode step's attention, where the engine computes its own
  bool decodes = true;          ///< does it take steps? Else prompts alone
  bool shares = false;          ///< can heads share a budget?
  attention_support attention = {};  ///< what the model's attention may have
};
/// What `p` needs, and can do, with its options.
template <policy P>
policy_needs needs_of(const P& p) {
  const bool decodes = declared(p).supports_decode();
  return {.queries = declared(p).prompt_use().needs_queries(),
          .step = decodes ? declared(p).needs() : observation_needs(),
          .decodes = decodes,
          .shares = declared(p).shares(),
          .attention = declared(p).supports()};
}

/// Throws unless `p` can hold a head of this capacity within `b`.
template <policy P>
void check(const P& p, const budget& b, index_t capacity) {
  declared(p).validate();
  if (!declared(p).evicts()) {
    return;
  }
  expects(b.slots > 0, p.name(), ": expected a budget of at least 1 slot, got ", b.slots);
  if (!declared(p).accepts(b.slots)) {
    expects(false, p.name(), ": expected a budget of at least ", declared(p).min_budget(),
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
  const attention_support can = declared(p).supports();
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
  expects(errc::unsupported, !head.one_memory() || declared(p).supports().one_memory, call,
          p.name(),
          ": expected values in memory of their own (it weights keys and values differently, or "
          "corrects them), got values in the keys' memory");
}

/// Throws unless `p` can leave the first slots of a head as they are.
template <policy P>
void expect_seals(const char* call, const P& p) {
  expects(errc::unsupported, declared(p).supports().seals, call, p.name(),
          ": expected a policy that can leave slots as they are (it keeps numbers of all slots, or "
          "moves the first ones), got one that cannot");
}

}  // namespace detail

/// Throws unless `p` goes with what a model computes in a layer (`unsupported`): which policy goes
/// with what is a table in docs/reference/policies.md.
template <policy P>
void check(const P& p, const attention_spec& spec) {
  declared(p).validate();
  detail::expect_attention("", p, spec);
}

namespace detail {

/// A state that was made by this policy, with these options: of its name, columns and memory.
/// Another policy's numbers mean something else: to go on, make a state and measure what remains.
template <policy P>
void expect_state(const P& p, const head_ref& head, const head_state& state) {
  expects(state.policy() == p.name(), p.name(), ": expected a state for ", p.name(),
          ", got one for ", state.policy().empty() ? "no policy" : state.policy());
  const index_t columns = declared(p).columns();
  const std::size_t memory =
      declared(p).memory(head.row_dim(), head.group(), state.memory_capacity());
  expects(state.slot_stats() == columns && state.memory_size() == memory, p.name(),
          ": expected a state of ", columns, " columns and ", memory, " floats, got ",
          state.slot_stats(), " columns and ", state.memory_size(),
          " floats (made with other options, or for a head of another shape)");
}

}  // namespace detail

/// Makes the plan that brings `head` to `target` slots: the identity when it holds no more. Merges
/// whose result the head's storage cannot hold are left out of it: these slots are evicted.
/// Refused: a state that does not fit, queries missing where the policy plans on them.
template <policy P, class Query>
void plan(const P& p, const head_ref& head, const head_state& state,
          const query_view<Query>& queries, index_t target, slot_scratch& work, merge_plan& out) {
  expects(state.length() == head.length() && !state.rests(), "plan: expected a state of ",
          head.length(), " slots (extend it), got ", state.length());
  if (!declared(p).evicts() || head.length() <= target) {
    return keep_all(head, out);
  }
  const auto make = [&](const query_view<float>& own) {
    declared(p).plan(head, state, own, target, work, out);
  };
  declared(p).uses_queries() ? in_floats(queries, head.group(), head.dim(), make)
                             : make(no_queries);
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
  declared(p).update_memory(head, state, change, work);
  merge::carry_out(change, head, state);
}

/// The budget of a head that never holds more than `slots` between steps, `eviction_batch` at once;
/// for prompts only, of so many.
template <policy P>
budget budget_within(const P& p, index_t slots) {
  if (!declared(p).supports_decode()) {
    return {slots};
  }
  const index_t free =
      std::min(declared(p).eviction_batch(slots), slots - declared(p).min_budget());
  const index_t target = std::max(slots - std::max(free, index_t{0}), index_t{1});
  return {target, budget{slots}.trigger_length()};
}

}  // namespace kvmeld::inline v0
