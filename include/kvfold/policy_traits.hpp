/// The members that a policy may leave out (see policy.hpp), with their defaults in one place.
#pragma once

#include <array>
#include <concepts>
#include <span>

#include "kvfold/attend.hpp"
#include "kvfold/detail/hooks.hpp"
#include "kvfold/merge/apply.hpp"
#include "kvfold/score/observation.hpp"

namespace kvfold::traits {

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

template <class P>
index_t min_budget(const P& p) {
  if constexpr (requires { p.min_budget(); }) {
    return p.min_budget();
  } else {
    return 1;
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
    return requires(const head_view<float>& head, head_state& state, const observation& observed) {
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
    return requires(const head_view<float>& head, const head_state& state,
                    const query_view<float>& queries, merge_plan& out) {
      p.plan(head, state, queries, index_t{}, out);
    };
  }
}

template <class P>
void observe(const P& p, const kv_head auto& head, head_state& state, const observation& observed) {
  if constexpr (requires { p.observe(head, state, observed); }) {
    p.observe(head, state, observed);
  }
}

template <class P, class T>
void observe(const P& p, const kv_head auto& head, head_state& state,
             const query_view<T>& queries) {
  if constexpr (requires { p.observe(head, state, queries); }) {
    p.observe(head, state, queries);
  }
}

template <class P, class T>
void plan(const P& p, const kv_head auto& head, const head_state& state,
          const query_view<T>& queries, index_t target, merge_plan& out) {
  if constexpr (requires { p.plan(head, state, queries, target, out); }) {
    if (queries.count > 0) {
      return p.plan(head, state, queries, target, out);
    }
  }
  p.plan(head, state, target, out);
}

/// What the policy wants to know from the step's attention; nothing, if it asks nothing.
template <class P>
void predict_victim(const P& p, const kv_head auto& head, head_state& state, index_t target,
                    key_comparison& comparison) {
  comparison.reset();
  if constexpr (requires { p.predict_victim(head, state, target, comparison); }) {
    p.predict_victim(head, state, target, comparison);
  }
}

/// One slot's departure: the policy's own, or none offered (false). `seen`: what attention has
/// answered, if it was asked.
template <class P>
bool choose_victim(const P& p, const kv_head auto& head, const head_state& state, index_t target,
                   slot_removal& out, const key_comparison& comparison = {}) {
  if constexpr (requires {
                  { p.choose_victim(head, state, target, out, comparison) } -> std::same_as<bool>;
                }) {
    return p.choose_victim(head, state, target, out, comparison);
  } else if constexpr (requires { p.choose_victim(head, state, target, comparison); }) {
    out = p.choose_victim(head, state, target, comparison);
    return true;
  } else if constexpr (requires {
                         { p.choose_victim(head, state, target, out) } -> std::same_as<bool>;
                       }) {
    return p.choose_victim(head, state, target, out);
  } else if constexpr (requires { p.choose_victim(head, state, target); }) {
    out = p.choose_victim(head, state, target);
    return true;
  } else {
    return false;
  }
}

template <class P, class Change>
void update_memory(const P& p, const kv_head auto& head, head_state& state, const Change& change) {
  if constexpr (requires { p.update_memory(head, state, change); }) {
    p.update_memory(head, state, change);
  }
}

template <class P>
void after_compress(const P& p, const kv_head auto& head, head_state& state, index_t target) {
  if constexpr (requires { p.after_compress(head, state, target); }) {
    p.after_compress(head, state, target);
  }
}

/// Attention over what the policy has made of the head: its own mass function, or log-mass.
template <class P>
void attend(const P& p, const kv_head auto& head, const head_state& state, const float* q,
            float* out, std::span<float> probabilities, std::span<float> log_sum_exp,
            key_comparison* comparison = nullptr) {
  if constexpr (requires {
                  p.attend(head, state, q, out, probabilities, log_sum_exp, comparison);
                }) {
    p.attend(head, state, q, out, probabilities, log_sum_exp, comparison);
  } else if constexpr (requires { p.mass(head, state); }) {
    kvfold::attend(head, p.mass(head, state), q, out, probabilities, log_sum_exp, comparison);
  } else {
    kvfold::attend(head, q, out, probabilities, log_sum_exp, comparison);
  }
}

}  // namespace kvfold::traits
