// SPDX-License-Identifier: MIT
/// The facts that a policy may omit (see policy.hpp), with their defaults in one place.
#pragma once

#include <array>
#include <concepts>
#include <span>

#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/merge/plan.hpp"
#include "kvmeld/policies/misdeclared_hooks.hpp"
#include "kvmeld/score/observation.hpp"
#include "kvmeld/score/prompt_use.hpp"
#include "kvmeld/search/slot_scratch.hpp"

namespace kvmeld {
inline namespace v0 {
namespace traits {

template <class P>
auto columns(const P& p) {
  if constexpr (requires { p.columns(); }) {
    return p.columns();
  } else {
    return std::array<column, 0>{};
  }
}

/// How many, without making them: `any_policy` would allocate.
template <class P>
index_t column_count(const P& p) {
  if constexpr (requires { p.column_count(); }) {
    return p.column_count();
  } else {
    return static_cast<index_t>(columns(p).size());
  }
}

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
  if constexpr (requires { p.memory_follows_capacity(dim, group, capacity); }) {
    return p.memory_follows_capacity(dim, group, capacity);
  } else if constexpr (requires { P::memory_follows_capacity; }) {
    return P::memory_follows_capacity;
  } else {
    const auto size = [&](index_t slots) { return memory(p, dim, group, slots); };
    const index_t other = capacity < (1 << 20) ? 2 * capacity : capacity / 2;
    return size(capacity) != size(1) || size(capacity) != size(other);
  }
}

template <class P>
index_t min_budget(const P& p) {
  if constexpr (requires { p.min_budget(); }) {
    return p.min_budget();
  } else {
    return 1;
  }
}

/// Is `target` at least `min_budget`? Some policies know without a search for it.
template <class P>
bool accepts(const P& p, index_t target) {
  if constexpr (requires {
                  { p.accepts(target) } -> std::same_as<bool>;
                }) {
    return p.accepts(target);
  } else {
    return target >= min_budget(p);
  }
}

template <class P>
index_t eviction_batch(const P& p, index_t slots) {
  if constexpr (requires { p.eviction_batch(slots); }) {
    return p.eviction_batch(slots);
  } else {
    return 0;
  }
}

template <class P>
void validate(const P& p) {
  static_assert(detail::hooks_of<P, detail::misdeclared<P>()>::fit);
  if constexpr (requires { p.validate(); }) {
    p.validate();
  }
}

template <class P>
group_combine combine(const P& p) {
  if constexpr (requires { p.combine(); }) {
    return p.combine();
  } else if constexpr (requires { group_combine{p.combine}; }) {
    return p.combine;
  } else {
    return group_combine::sum;
  }
}

template <class P>
bool bounded(const P& p) {
  if constexpr (requires { p.bounded(); }) {
    return p.bounded();
  } else if constexpr (requires { P::bounded; }) {
    return P::bounded;
  } else {
    return true;
  }
}

/// Does the policy compress while decoding?
template <class P>
bool decodes(const P& p) {
  if constexpr (requires { p.decodes(); }) {
    return p.decodes();
  } else if constexpr (requires { P::decodes; }) {
    return P::decodes;
  } else {
    return true;
  }
}

/// Does the policy fold attention into its state? `any_policy` knows at run time only.
template <class P>
bool measures(const P& p) {
  if constexpr (requires { p.measures(); }) {
    return p.measures();
  } else {
    return requires(const head_ref& head, head_state& state, const observation& observed) {
      p.observe(head, state, observed);
    };
  }
}

/// Does the policy plan on the reference queries themselves?
template <class P>
bool plans_on_queries(const P& p) {
  if constexpr (requires { p.plans_on_queries(); }) {
    return p.plans_on_queries();
  } else {
    return requires(const head_ref& head, const head_state& state, const query_view<float>& queries,
                    slot_scratch& work, merge_plan& out) {
      p.plan(head, state, queries, index_t{}, work, out);
    };
  }
}

/// What the policy takes of a prompt's queries; all of them where it observes any and says nothing.
template <class P>
kvmeld::prompt_use prompt_use_of(const P& p) {
  if constexpr (requires { p.prompt_use(); }) {
    return p.prompt_use();
  } else {
    return {.measures = requires(const head_ref& head, head_state& state,
                                 const query_view<float>& queries){p.observe(head, state, queries);
  }
};
}  // namespace traits
}  // namespace v0

/// What the policy needs of a step's attention; all of it where it observes steps and says nothing.
template <class P>
kvmeld::observation_needs observation_needs_of(const P& p) {
  if constexpr (requires { p.needs(); }) {
    return p.needs();
  } else {
    const bool all = measures(p);
    return {all, all, all};
  }
}

}  // namespace kvmeld
}  // namespace v0
}  // namespace kvmeld
