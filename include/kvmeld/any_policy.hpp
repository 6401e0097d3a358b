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
///
/// What runs a policy over a head is defined outside of the class, so that a program with many
/// files may compile it once: the target `kvmeld::compiled`.
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

  /// What the policy inside says and does; its default where it omits a member (policy.hpp).
  /// @{
  std::string_view name() const {
    return visit([](const auto& p) { return std::string_view(p.name()); });
  }
  std::vector<column> columns() const {
    return visit([](const auto& p) {
      const auto columns = traits::columns(p);
      return std::vector<column>(columns.begin(), columns.end());
    });
  }
  index_t column_count() const {
    return visit([](const auto& p) { return traits::column_count(p); });
  }
  std::size_t memory(index_t dim, index_t group, index_t capacity) const {
    return visit([&](const auto& p) { return traits::memory(p, dim, group, capacity); });
  }
  bool memory_follows_capacity(index_t dim, index_t group, index_t capacity) const {
    return visit(
        [&](const auto& p) { return traits::memory_follows_capacity(p, dim, group, capacity); });
  }
  index_t min_budget() const {
    return visit([](const auto& p) { return traits::min_budget(p); });
  }
  bool accepts(index_t target) const {
    return visit([&](const auto& p) { return traits::accepts(p, target); });
  }
  index_t eviction_batch(index_t slots) const {
    return visit([&](const auto& p) { return traits::eviction_batch(p, slots); });
  }
  void validate() const {
    visit([](const auto& p) { traits::validate(p); });
  }
  group_combine combine() const {
    return visit([](const auto& p) { return traits::combine(p); });
  }
  bool bounded() const {
    return visit([](const auto& p) { return traits::bounded(p); });
  }
  bool decodes() const {
    return visit([](const auto& p) { return traits::decodes(p); });
  }
  bool measures() const {
    return visit([](const auto& p) { return traits::measures(p); });
  }
  bool plans_on_queries() const {
    return visit([](const auto& p) { return traits::plans_on_queries(p); });
  }
  kvmeld::prompt_use prompt_use() const {
    return visit([](const auto& p) { return traits::prompt_use_of(p); });
  }
  observation_needs needs() const {
    return visit([](const auto& p) { return traits::observation_needs_of(p); });
  }

  void observe(const kv_head auto& head, head_state& state, const observation& observed) const;
  template <class T>
  void observe(const kv_head auto& head, head_state& state, const query_view<T>& queries) const;
  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const;
  template <class T>
  void plan(const kv_head auto& head, const head_state& state, const query_view<T>& queries,
            index_t target, slot_scratch& work, merge_plan& out) const;
  void predict_victim(const kv_head auto& head, head_state& state, index_t target,
                      key_comparison& comparison) const;
  std::optional<slot_removal> choose_victim(const kv_head auto& head, const head_state& state,
                                            index_t target, const key_comparison& comparison) const;
  template <class Change>
  void update_memory(const kv_head auto& head, head_state& state, const Change& change,
                     slot_scratch& work) const;
  void after_compress(const kv_head auto& head, head_state& state, index_t target) const;
  void attend(const kv_head auto& head, const head_state& state, const float* q, float* out,
              std::span<float> probabilities, std::span<float> log_sum_exp,
              key_comparison* comparison = nullptr) const;

  /// @}

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

template <policy... Policies>
void basic_any_policy<Policies...>::observe(const kv_head auto& head, head_state& state,
                                            const observation& observed) const {
  switch_to<0>(policy_, [&](const auto& p) { traits::observe(p, head, state, observed); });
}

template <policy... Policies>
template <class T>
void basic_any_policy<Policies...>::observe(const kv_head auto& head, head_state& state,
                                            const query_view<T>& queries) const {
  switch_to<0>(policy_, [&](const auto& p) { traits::observe(p, head, state, queries); });
}

template <policy... Policies>
void basic_any_policy<Policies...>::plan(const kv_head auto& head, const head_state& state,
                                         index_t target, slot_scratch& work,
                                         merge_plan& out) const {
  switch_to<0>(policy_,
               [&](const auto& p) { traits::plan(p, head, state, no_queries, target, work, out); });
}

template <policy... Policies>
template <class T>
void basic_any_policy<Policies...>::plan(const kv_head auto& head, const head_state& state,
                                         const query_view<T>& queries, index_t target,
                                         slot_scratch& work, merge_plan& out) const {
  switch_to<0>(policy_,
               [&](const auto& p) { traits::plan(p, head, state, queries, target, work, out); });
}

template <policy... Policies>
void basic_any_policy<Policies...>::predict_victim(const kv_head auto& head, head_state& state,
                                                   index_t target,
                                                   key_comparison& comparison) const {
  switch_to<0>(policy_,
               [&](const auto& p) { traits::predict_victim(p, head, state, target, comparison); });
}

template <policy... Policies>
std::optional<slot_removal> basic_any_policy<Policies...>::choose_victim(
    const kv_head auto& head, const head_state& state, index_t target,
    const key_comparison& comparison) const {
  return switch_to<0>(policy_, [&](const auto& p) {
    return traits::choose_victim(p, head, state, target, comparison);
  });
}

template <policy... Policies>
template <class Change>
void basic_any_policy<Policies...>::update_memory(const kv_head auto& head, head_state& state,
                                                  const Change& change, slot_scratch& work) const {
  switch_to<0>(policy_,
               [&](const auto& p) { traits::update_memory(p, head, state, change, work); });
}

template <policy... Policies>
void basic_any_policy<Policies...>::after_compress(const kv_head auto& head, head_state& state,
                                                   index_t target) const {
  switch_to<0>(policy_, [&](const auto& p) { traits::after_compress(p, head, state, target); });
}

template <policy... Policies>
void basic_any_policy<Policies...>::attend(const kv_head auto& head, const head_state& state,
                                           const float* q, float* out,
                                           std::span<float> probabilities,
                                           std::span<float> log_sum_exp,
                                           key_comparison* comparison) const {
  switch_to<0>(policy_, [&](const auto& p) {
    traits::attend(p, head, state, q, out, probabilities, log_sum_exp, comparison);
  });
}

/// Every policy of the library.
using any_policy =
    basic_any_policy<full_cache, streaming_llm, h2o, snapkv, zsmerge, d2o, kvmerger, ems, keepkv,
                     attention_matching, kvzip, fold, random_tokens, tova, roco, scissorhands,
                     key_diff, expected_attention, centroids, compactor, cam>;

static_assert(policy<any_policy>);

/// These, and `Own`: policies of one's own.
template <policy... Own>
using any_policy_with = basic_any_policy<any_policy, Own...>;

#ifdef KVMELD_COMPILED
namespace detail {
extern template struct hooks<any_policy, head_ref>;
}
#endif

}  // namespace v0
}  // namespace kvmeld
