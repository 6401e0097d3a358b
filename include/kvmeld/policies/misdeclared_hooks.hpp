// SPDX-License-Identifier: MIT
/// Members of a policy that have a hook's name and cannot be called as the hook is: a misspelt
/// signature would be ignored otherwise.
#pragma once

#include <concepts>  // std::convertible_to
#include <optional>
#include <type_traits>  // std::is_final_v

#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/merge/plan.hpp"
#include "kvmeld/merge/slot_removal.hpp"
#include "kvmeld/score/fused_similarity.hpp"
#include "kvmeld/score/observation.hpp"
#include "kvmeld/search/protection.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld {
inline namespace v0 {
namespace detail {

/// The optional members of a policy, and `plan`, which may have a form with queries.
enum class hook {
  none,
  slot_stats,
  memory,
  min_budget,
  eviction_batch,
  validate,
  combine,
  protects,
  observe,
  plan,
  choose_victim,
  predict_victim,
  update_memory,
  after_compress,
  mass
};

// Does `P` have a member of that name, whatever it is? If so, the name is ambiguous in a class that
// inherits it from two.
#define KVMELD_HOOK(hook)                          \
  struct other_##hook {                            \
    int hook;                                      \
  };                                               \
  template <class P>                               \
  struct both_##hook : P, other_##hook {};         \
  template <class P>                               \
  consteval bool names_##hook() {                  \
    if constexpr (std::is_final_v<P>) {            \
      return false;                                \
    } else {                                       \
      return !requires { &both_##hook<P>::hook; }; \
    }                                              \
  }
KVMELD_HOOK(slot_stats)
KVMELD_HOOK(memory)
KVMELD_HOOK(min_budget)
KVMELD_HOOK(eviction_batch)
KVMELD_HOOK(validate)
KVMELD_HOOK(combine)
KVMELD_HOOK(protects)
KVMELD_HOOK(observe)
KVMELD_HOOK(choose_victim)
KVMELD_HOOK(predict_victim)
KVMELD_HOOK(update_memory)
KVMELD_HOOK(after_compress)
KVMELD_HOOK(mass)
#undef KVMELD_HOOK

using hook_head = head_ref;

template <class P>
concept combines_by_value = requires(P& p) {
  { p.combine } -> std::convertible_to<group_combine>;
};
template <class P>
concept combines_by_call = requires(P& p) {
  { p.combine() } -> std::convertible_to<group_combine>;
};
template <class P>
concept protects_tokens = requires(P& p, const hook_head& head) {
  { p.protects(head, index_t{}) } -> std::convertible_to<protection>;
};
template <class P>
concept scores_slots = requires(P& p, const hook_head& head, const head_state& state) {
  p.score(head, state, index_t{});
};
template <class P>
concept makes_plans = requires(P& p, const hook_head& head, const head_state& state,
                               slot_scratch& work, merge_plan& out) {
  p.plan(head, state, index_t{}, work, out);
};
template <class P>
concept observes_step = requires(P& p, const hook_head& head, head_state& state,
                                 const observation& x) {
  p.observe(head, state, x);
};
template <class P>
concept observes_queries = requires(P& p, const hook_head& head, head_state& state,
                                    const query_view<float>& x) {
  p.observe(head, state, x);
};
template <class P>
concept plans_with_queries = requires(P& p, const hook_head& head, const head_state& state,
                                      const query_view<float>& x, slot_scratch& work,
                                      merge_plan& out) {
  p.plan(head, state, x, index_t{}, work, out);
};
template <class P>
concept updates_by_removal = requires(P& p, const hook_head& head, head_state& state,
                                      const slot_removal& x, slot_scratch& work) {
  p.update_memory(head, state, x, work);
};
template <class P>
concept updates_by_plan = requires(P& p, const hook_head& head, head_state& state,
                                   const merge_plan& x, slot_scratch& work) {
  p.update_memory(head, state, x, work);
};
template <class P>
concept chooses = requires(P& p, const hook_head& head, const head_state& state,
                           const fused_similarity& x) {
  {
    p.choose_victim(head, state, index_t{}, x)
    } -> std::convertible_to<std::optional<slot_removal>>;
};
template <class P>
concept predicts = requires(P& p, const hook_head& head, head_state& state, fused_similarity& x) {
  p.predict_victim(head, state, index_t{}, x);
};
template <class P>
concept ends_compress = requires(P& p, const hook_head& head, head_state& state) {
  p.after_compress(head, state, index_t{});
};

/// The first hook that `P` means to have and has not; `none` if all is well.
template <class P>
consteval hook misdeclared() {
  using C = const P;
  if (names_slot_stats<P>() && !requires(C & p) { p.slot_stats().size(); }) {
    return hook::slot_stats;
  }
  if (names_memory<P>() && !requires(C & p) { p.memory(index_t{}, index_t{}, index_t{}); }) {
    return hook::memory;
  }
  if (names_min_budget<P>() && !requires(C & p) { index_t{p.min_budget()}; }) {
    return hook::min_budget;
  }
  if (names_eviction_batch<P>() && !requires(C & p) { index_t{p.eviction_batch(index_t{})}; }) {
    return hook::eviction_batch;
  }
  if (names_validate<P>() && !requires(C & p) { p.validate(); }) {
    return hook::validate;
  }
  if (names_combine<P>() && !combines_by_value<C> && !combines_by_call<C>) {
    return hook::combine;
  }
  if (names_protects<P>() && !protects_tokens<C>) {
    return hook::protects;
  }
  // Where there are two forms, one that only a policy that is not const has is ignored as well.
  if ((names_observe<P>() && !observes_step<C> && !observes_queries<C>) ||
      observes_step<P> != observes_step<C> || observes_queries<P> != observes_queries<C>) {
    return hook::observe;
  }
  if (plans_with_queries<P> != plans_with_queries<C>) {
    return hook::plan;
  }
  if (names_choose_victim<P>() && !chooses<C>) {
    return hook::choose_victim;
  }
  if (names_predict_victim<P>() && !predicts<C>) {
    return hook::predict_victim;
  }
  if ((names_update_memory<P>() && !updates_by_removal<C> && !updates_by_plan<C>) ||
      updates_by_removal<P> != updates_by_removal<C> || updates_by_plan<P> != updates_by_plan<C>) {
    return hook::update_memory;
  }
  if (names_after_compress<P>() && !ends_compress<C>) {
    return hook::after_compress;
  }
  if (names_mass<P>() &&
      !requires(C & p, const hook_head& head, const head_state& state) { p.mass(head, state); }) {
    return hook::mass;
  }
  return hook::none;
}

/// The compiler's message names the hook.
template <class P, hook misdeclared_hook>
struct hooks_of {
  static_assert(
      misdeclared_hook == hook::none,
      "kvmeld: expected a policy's member with a hook's name to be const and to take the arguments "
      "of policy.hpp");
  static constexpr bool fit = true;
};

}  // namespace detail
}  // namespace v0
}  // namespace kvmeld
