// SPDX-License-Identifier: MIT
/// A policy chosen at run time, so that every head of every layer may have its own.
#pragma once

#include <concepts>  // std::same_as
#include <optional>
#include <string_view>
#include <utility>  // std::in_place_index
#include <variant>
#include <vector>

#include "kvmeld/policies/compiled.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/prompt_use.hpp"

namespace kvmeld {
inline namespace v0 {

namespace detail {

/// Is `One` the policy `P`, or can it hold one?
template <class P, class One>
consteval bool holds() {
  if constexpr (requires { One::template holds<P>(); }) {
    return std::same_as<P, One> || One::template holds<P>();
  } else {
    return std::same_as<P, One>;
  }
}

}  // namespace detail

/// One of `Policies`, itself a policy. Each call is one switch a head, none a slot.
template <policy... Policies>
class basic_any_policy {
 public:
  /// Can it be a `P`, itself or inside of one of `Policies`?
  template <class P>
  static consteval bool holds() {
    return (detail::holds<P, Policies>() || ...);
  }

  /// The alternative `p`.
  template <class P>
  requires(holds<P>()) basic_any_policy(P p)  // NOLINT: a policy is one of the alternatives
      : policy_(std::in_place_index<place<P>()>, std::move(p)) {}

  /// One of each, with its default parameters.
  static std::vector<basic_any_policy> every() {
    std::vector<basic_any_policy> all;
    (add_every<Policies>(all), ...);
    return all;
  }

  /// What the policy inside says; its default where it omits a member (policy.hpp).
  /// @{
  std::string_view name() const {
    return visit([](const auto& p) { return std::string_view(p.name()); });
  }
  std::vector<slot_stat> slot_stats() const { return traits::slot_stats(*this); }
  std::size_t memory(index_t dim, index_t group, index_t capacity) const {
    return traits::memory(*this, dim, group, capacity);
  }
  index_t min_budget() const { return traits::min_budget(*this); }
  index_t eviction_batch(index_t slots) const { return traits::eviction_batch(*this, slots); }
  void validate() const { traits::validate(*this); }
  group_combine combine() const { return traits::combine(*this); }
  bool evicts() const { return traits::evicts(*this); }
  bool supports_decode() const { return traits::supports_decode(*this); }
  bool uses_attention() const { return traits::uses_attention(*this); }
  bool uses_queries() const { return traits::uses_queries(*this); }
  kvmeld::prompt_use prompt_use() const { return traits::prompt_use_of(*this); }
  observation_needs needs() const { return traits::observation_needs_of(*this); }
  /// @}

  /// The plan of the policy inside. All that else runs it over a head visits it.
  void plan(const head_ref& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    traits::plan(*this, head, state, no_queries, target, work, out);
  }

  /// `f` is called with the policy inside, however deep.
  template <class F>
  decltype(auto) visit(F&& f) const {
    return switch_to<0>(policy_, into(f));
  }
  /// The same, for a policy that may be changed.
  template <class F>
  decltype(auto) visit(F&& f) {
    return switch_to<0>(policy_, into(f));
  }

 private:
  /// `std::visit` would cost the compiler a table and a function for each of twenty alternatives.
  template <std::size_t I, class V, class F>
  static decltype(auto) switch_to(V& policy, const F& f) {
    if constexpr (I + 1 < sizeof...(Policies)) {
      if (policy.index() != I) {
        return switch_to<I + 1>(policy, f);
      }
    }
    return f(*std::get_if<I>(&policy));
  }

  /// Which of the alternatives a `P` is, or is inside of.
  template <class P>
  static consteval std::size_t place() {
    std::size_t at = 0;
    const bool found = ((detail::holds<P, Policies>() || (++at, false)) || ...);
    return found ? at : 0;
  }
  template <class P>
  static void add_every(std::vector<basic_any_policy>& all) {
    if constexpr (requires { P::every(); }) {
      for (const auto& p : P::every()) {
        all.push_back(p);
      }
    } else {
      all.push_back(P{});
    }
  }
  template <class F>
  static auto into(F& f) {
    return [&f](auto& p) -> decltype(auto) {
      if constexpr (requires { p.every(); }) {
        return p.visit(f);
      } else {
        return f(p);
      }
    };
  }

  std::variant<Policies...> policy_;
};

/// Every policy of the library.
using any_policy =
    basic_any_policy<full_cache, streaming_llm, h2o, snapkv, zsmerge, d2o, kvmerger, ems, keepkv,
                     attention_matching, kvzip, fold, random_tokens, tova, roco, scissorhands,
                     key_diff, expected_attention, centroids, compactor, cam>;

static_assert(policy<any_policy>);

/// These, and `Own`: policies of one's own.
template <policy... Own>
using any_policy_with = basic_any_policy<any_policy, Own...>;

}  // namespace v0
}  // namespace kvmeld
