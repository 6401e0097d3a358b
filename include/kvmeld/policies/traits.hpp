// SPDX-License-Identifier: MIT
/// What a policy may omit (see policy.hpp), with the defaults in one place: its facts here, what
/// runs it over a head in hooks.hpp. Of a policy chosen at run time: those of the one inside.
#pragma once

#include <vector>

#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/policies/misdeclared_hooks.hpp"
#include "kvmeld/score/prompt_use.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld {
inline namespace v0 {
namespace detail {

/// Calls `f` with the policy itself, or with the one that it holds at run time.
template <class P, class F>
decltype(auto) with_policy(const P& p, const F& f) {
  if constexpr (requires { P::every(); }) {
    return p.visit(f);
  } else {
    return f(p);
  }
}

/// A head without slots: what a policy protects is asked of it where no head is there yet.
inline const head_ref& empty_head() {
  static index_t none = 0;
  static const attention_spec spec{.key_dim = 1};
  static const head_ref head({.length = &none, .next_position = &none}, 0, spec, storage::f32, {},
                             {});
  return head;
}

}  // namespace detail

namespace traits {

/// One float per slot each, in `head_state`.
template <class P>
std::vector<slot_stat> slot_stats(const P& policy) {
  return detail::with_policy(policy, [](const auto& p) -> std::vector<slot_stat> {
    if constexpr (requires { p.slot_stats(); }) {
      const auto list = p.slot_stats();
      return {list.begin(), list.end()};
    } else {
      return {};
    }
  });
}

/// How many, without allocating.
template <class P>
index_t slot_stat_count(const P& policy) {
  return detail::with_policy(policy, [](const auto& p) -> index_t {
    if constexpr (requires { p.slot_stats(); }) {
      return static_cast<index_t>(p.slot_stats().size());
    } else {
      return 0;
    }
  });
}

/// Floats per head beside the slots'.
template <class P>
std::size_t memory(const P& policy, index_t dim, index_t group, index_t capacity) {
  return detail::with_policy(policy, [&](const auto& p) -> std::size_t {
    if constexpr (requires { p.memory(dim, group, capacity); }) {
      return p.memory(dim, group, capacity);
    } else {
      return 0;
    }
  });
}

/// Does the layout of the policy's memory depend on the capacity? Memory of another size for
/// another capacity does; memory of one size may too, as the policy says.
template <class P>
bool memory_follows_capacity(const P& policy, index_t dim, index_t group, index_t capacity) {
  return detail::with_policy(policy, [&]<class One>(const One& p) -> bool {
    if constexpr (requires { One::memory_follows_capacity; }) {
      return One::memory_follows_capacity;
    } else {
      const auto size = [&](index_t slots) { return memory(p, dim, group, slots); };
      const index_t other = capacity < (1 << 20) ? 2 * capacity : capacity / 2;
      return size(capacity) != size(1) || size(capacity) != size(other);
    }
  });
}

/// Tokens that are never evicted from a head of `target` slots.
template <class P>
protection protects(const P& p, const head_ref& head, index_t target) {
  if constexpr (detail::protects_tokens<const P>) {
    return p.protects(head, target);
  } else {
    return {};
  }
}

/// Is `target` at least `min_budget`? Known without a search for it where a policy says so, or says
/// what it protects: one more slot than that.
template <class P>
bool accepts(const P& policy, index_t target) {
  return detail::with_policy(policy, [&](const auto& p) -> bool {
    if constexpr (requires { p.accepts(target); }) {
      return p.accepts(target);
    } else if constexpr (requires { p.min_budget(); }) {
      return target >= p.min_budget();
    } else {
      const protection kept = protects(p, detail::empty_head(), target);
      return target - kept.sinks > kept.recent;
    }
  });
}

/// The smallest target that the policy accepts.
template <class P>
index_t min_budget(const P& policy) {
  return detail::with_policy(policy, [](const auto& p) -> index_t {
    if constexpr (requires { p.min_budget(); }) {
      return p.min_budget();
    } else {
      return search::least_target(1, [&](index_t target) { return accepts(p, target); });
    }
  });
}

/// Slots better freed at once in decode.
template <class P>
index_t eviction_batch(const P& policy, index_t slots) {
  return detail::with_policy(policy, [&](const auto& p) -> index_t {
    if constexpr (requires { p.eviction_batch(slots); }) {
      return p.eviction_batch(slots);
    } else {
      return 0;
    }
  });
}

/// Throws on parameters out of range. Here a member that has a hook's name and cannot be called as
/// that hook does not compile.
template <class P>
void validate(const P& policy) {
  detail::with_policy(policy, []<class One>(const One& p) {
    static_assert(detail::hooks_of<One, detail::misdeclared<One>()>::fit);
    if constexpr (requires { p.validate(); }) {
      p.validate();
    }
  });
}

/// How the attention of a group's queries becomes one.
template <class P>
group_combine combine(const P& policy) {
  return detail::with_policy(policy, [](const auto& p) -> group_combine {
    if constexpr (requires { p.combine(); }) {
      return p.combine();
    } else if constexpr (requires { group_combine{p.combine}; }) {
      return p.combine;
    } else {
      return group_combine::sum;
    }
  });
}

/// Does the policy ever compress?
template <class P>
bool evicts(const P& policy) {
  return detail::with_policy(policy, []<class One>(const One&) -> bool {
    if constexpr (requires { One::evicts; }) {
      return One::evicts;
    } else {
      return true;
    }
  });
}

/// Does the policy compress while decoding?
template <class P>
bool supports_decode(const P& policy) {
  return detail::with_policy(policy, []<class One>(const One&) -> bool {
    if constexpr (requires { One::supports_decode; }) {
      return One::supports_decode;
    } else {
      return true;
    }
  });
}

/// Does the policy take a decode step's attention into its state?
template <class P>
bool uses_attention(const P& policy) {
  return detail::with_policy(
      policy, []<class One>(const One&) -> bool { return detail::observes_step<const One>; });
}

/// Does the policy plan on the reference queries themselves?
template <class P>
bool uses_queries(const P& policy) {
  return detail::with_policy(
      policy, []<class One>(const One&) -> bool { return detail::plans_with_queries<const One>; });
}

/// What the policy takes of a prompt's queries; all of them where it observes any and says nothing.
template <class P>
kvmeld::prompt_use prompt_use_of(const P& policy) {
  return detail::with_policy(policy, []<class One>(const One& p) -> kvmeld::prompt_use {
    if constexpr (requires { p.prompt_use(); }) {
      return p.prompt_use();
    } else {
      return {.observes = detail::observes_queries<const One>};
    }
  });
}

/// What the policy needs of a step's attention; all of it where it observes steps and says nothing.
template <class P>
kvmeld::observation_needs observation_needs_of(const P& policy) {
  return detail::with_policy(policy, [](const auto& p) -> kvmeld::observation_needs {
    if constexpr (requires { p.needs(); }) {
      return p.needs();
    } else {
      const bool all = uses_attention(p);
      return {all, all, all};
    }
  });
}

}  // namespace traits
}  // namespace v0
}  // namespace kvmeld
