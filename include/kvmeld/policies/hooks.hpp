// SPDX-License-Identifier: MIT
/// What runs a policy over a head: its members, or defaults for those that it omits.
#pragma once

#include <concepts>  // std::same_as
#include <optional>
#include <span>

#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/merge/plan.hpp"
#include "kvmeld/merge/rows.hpp"
#include "kvmeld/merge/slot_removal.hpp"
#include "kvmeld/policies/traits.hpp"
#include "kvmeld/score/attention.hpp"
#include "kvmeld/score/observation.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld {
inline namespace v0 {
namespace detail {

/// What runs a policy `P` over a head, with a default for every member that `P` omits. One class,
/// and its members defined outside of it, so that a program with many files may compile it once
/// (`kvmeld::compiled`).
template <class P>
struct hooks {
  static void observe(const P& p, const head_ref& head, head_state& state,
                      const observation& observed);
  static void observe(const P& p, const head_ref& head, head_state& state,
                      const query_view<float>& queries);
  static void plan(const P& p, const head_ref& head, const head_state& state,
                   const query_view<float>& queries, index_t target, slot_scratch& work,
                   merge_plan& out);
  static void predict_victim(const P& p, const head_ref& head, head_state& state, index_t target,
                             fused_similarity& comparison);
  static std::optional<slot_removal> choose_victim(const P& p, const head_ref& head,
                                                   const head_state& state, index_t target,
                                                   const fused_similarity& comparison);
  static void update_memory(const P& p, const head_ref& head, head_state& state,
                            const merge_plan& change, slot_scratch& work);
  static void update_memory(const P& p, const head_ref& head, head_state& state,
                            const slot_removal& change, slot_scratch& work);
  static void after_compress(const P& p, const head_ref& head, head_state& state, index_t target);
  static void attend(const P& p, const head_ref& head, const head_state& state, const float* q,
                     float* out, std::span<float> probabilities, std::span<float> log_sum_exp,
                     fused_similarity* comparison);
};

template <class P, class T>
void observe_queries(const P& p, const head_ref& head, head_state& state,
                     const query_view<T>& queries) {
  if constexpr (requires { p.observe(head, state, queries); }) {
    p.observe(head, state, queries);
  }
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

template <class P, class T>
void plan_on_queries(const P& p, const head_ref& head, const head_state& state,
                     const query_view<T>& queries, index_t target, slot_scratch& work,
                     merge_plan& out) {
  if constexpr (requires { p.plan(head, state, queries, target, work, out); }) {
    if (queries.count > 0) {
      return p.plan(head, state, queries, target, work, out);
    }
  }
  if constexpr (makes_plans<const P>) {
    p.plan(head, state, target, work, out);
  } else {
    evict(head, target, protected_slots(head, traits::protects(p, head, target)),
          score_of(p, head, state), work, out);
  }
}

template <class P, class Change>
void update_memory_by(const P& p, const head_ref& head, head_state& state, const Change& change,
                      slot_scratch& work) {
  if constexpr (requires { p.update_memory(head, state, change, work); }) {
    p.update_memory(head, state, change, work);
  }
}

template <class P>
void hooks<P>::observe(const P& p, const head_ref& head, head_state& state,
                       const observation& observed) {
  if constexpr (requires { p.observe(head, state, observed); }) {
    p.observe(head, state, observed);
  }
}

template <class P>
void hooks<P>::observe(const P& p, const head_ref& head, head_state& state,
                       const query_view<float>& queries) {
  observe_queries(p, head, state, queries);
}

template <class P>
void hooks<P>::plan(const P& p, const head_ref& head, const head_state& state,
                    const query_view<float>& queries, index_t target, slot_scratch& work,
                    merge_plan& out) {
  plan_on_queries(p, head, state, queries, target, work, out);
}

template <class P>
void hooks<P>::predict_victim(const P& p, const head_ref& head, head_state& state, index_t target,
                              fused_similarity& comparison) {
  comparison.reset();
  if constexpr (requires { p.predict_victim(head, state, target, comparison); }) {
    p.predict_victim(head, state, target, comparison);
  }
}

template <class P>
std::optional<slot_removal> hooks<P>::choose_victim(const P& p, const head_ref& head,
                                                    const head_state& state, index_t target,
                                                    const fused_similarity& comparison) {
  if constexpr (requires { p.choose_victim(head, state, target, comparison); }) {
    return p.choose_victim(head, state, target, comparison);
  } else if constexpr (scores_slots<const P> && !makes_plans<const P>) {
    return slot_removal{.removed = search::lowest_scored(
                            head.length(), protected_slots(head, traits::protects(p, head, target)),
                            score_of(p, head, state))};
  } else {
    return std::nullopt;
  }
}

template <class P>
void hooks<P>::update_memory(const P& p, const head_ref& head, head_state& state,
                             const merge_plan& change, slot_scratch& work) {
  update_memory_by(p, head, state, change, work);
}

template <class P>
void hooks<P>::update_memory(const P& p, const head_ref& head, head_state& state,
                             const slot_removal& change, slot_scratch& work) {
  update_memory_by(p, head, state, change, work);
}

template <class P>
void hooks<P>::after_compress(const P& p, const head_ref& head, head_state& state, index_t target) {
  if constexpr (requires { p.after_compress(head, state, target); }) {
    p.after_compress(head, state, target);
  }
}

template <class P>
void hooks<P>::attend(const P& p, const head_ref& head, const head_state& state, const float* q,
                      float* out, std::span<float> probabilities, std::span<float> log_sum_exp,
                      fused_similarity* comparison) {
  if constexpr (requires {
                  p.attend(head, state, q, out, probabilities, log_sum_exp, comparison);
                }) {
    p.attend(head, state, q, out, probabilities, log_sum_exp, comparison);
  } else if constexpr (requires { p.mass(head, state); }) {
    kvmeld::attend(head, p.mass(head, state), q, out, probabilities, log_sum_exp, comparison);
  } else {
    kvmeld::attend(head, log_mass_of<head_ref>{head}, q, out, probabilities, log_sum_exp,
                   comparison);
  }
}

}  // namespace detail

namespace traits {

/// One decode step's attention.
template <class P>
void observe(const P& policy, const head_ref& head, head_state& state, const observation& seen) {
  detail::with_policy(
      policy, [&]<class One>(const One& p) { detail::hooks<One>::observe(p, head, state, seen); });
}

/// Reference queries.
template <class P, class T>
void observe(const P& policy, const head_ref& head, head_state& state,
             const query_view<T>& queries) {
  detail::with_policy(policy, [&]<class One>(const One& p) {
    if constexpr (std::same_as<T, float>) {
      detail::hooks<One>::observe(p, head, state, queries);
    } else {
      detail::observe_queries(p, head, state, queries);
    }
  });
}

template <class P, class T>
void plan(const P& policy, const head_ref& head, const head_state& state,
          const query_view<T>& queries, index_t target, slot_scratch& work, merge_plan& out) {
  detail::with_policy(policy, [&]<class One>(const One& p) {
    if constexpr (std::same_as<T, float>) {
      detail::hooks<One>::plan(p, head, state, queries, target, work, out);
    } else {
      detail::plan_on_queries(p, head, state, queries, target, work, out);
    }
  });
}

/// What the policy wants compared during the step's attention; nothing, if it predicts nothing.
template <class P>
void predict_victim(const P& policy, const head_ref& head, head_state& state, index_t target,
                    fused_similarity& comparison) {
  detail::with_policy(policy, [&]<class One>(const One& p) {
    detail::hooks<One>::predict_victim(p, head, state, target, comparison);
  });
}

/// One slot's removal: the policy's own, or none offered. `comparison`: what attention has
/// computed, if the policy predicted a victim.
template <class P>
std::optional<slot_removal> choose_victim(const P& policy, const head_ref& head,
                                          const head_state& state, index_t target,
                                          const fused_similarity& comparison = {}) {
  return detail::with_policy(policy, [&]<class One>(const One& p) {
    return detail::hooks<One>::choose_victim(p, head, state, target, comparison);
  });
}

/// The policy's memory follows a change, which is `merge_plan` or `slot_removal`, before it is
/// applied.
template <class P, class Change>
void update_memory(const P& policy, const head_ref& head, head_state& state, const Change& change,
                   slot_scratch& work) {
  detail::with_policy(policy, [&]<class One>(const One& p) {
    detail::hooks<One>::update_memory(p, head, state, change, work);
  });
}

template <class P>
void after_compress(const P& policy, const head_ref& head, head_state& state, index_t target) {
  detail::with_policy(policy, [&]<class One>(const One& p) {
    detail::hooks<One>::after_compress(p, head, state, target);
  });
}

/// Attention over what the policy has made of the head: its own mass function, or log-mass.
template <class P>
void attend(const P& policy, const head_ref& head, const head_state& state, const float* q,
            float* out, std::span<float> probabilities, std::span<float> log_sum_exp,
            fused_similarity* comparison = nullptr) {
  detail::with_policy(policy, [&]<class One>(const One& p) {
    detail::hooks<One>::attend(p, head, state, q, out, probabilities, log_sum_exp, comparison);
  });
}

}  // namespace traits
}  // namespace v0
}  // namespace kvmeld
