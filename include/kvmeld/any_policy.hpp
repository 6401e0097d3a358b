// SPDX-License-Identifier: MIT
/// A policy chosen at run time, so that every head of every layer may have its own.
#pragma once

#include <algorithm>  // std::min
#include <concepts>   // std::same_as
#include <string_view>
#include <utility>  // std::move
#include <variant>
#include <vector>

#include "kvmeld/policies/attention_matching.hpp"
#include "kvmeld/policies/cam.hpp"
#include "kvmeld/policies/centroids.hpp"
#include "kvmeld/policies/compactor.hpp"
#include "kvmeld/policies/d2o.hpp"
#include "kvmeld/policies/dropkv.hpp"
#include "kvmeld/policies/ems.hpp"
#include "kvmeld/policies/expected_attention.hpp"
#include "kvmeld/policies/fold.hpp"
#include "kvmeld/policies/full_cache.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "kvmeld/policies/hooks.hpp"
#include "kvmeld/policies/keepkv.hpp"
#include "kvmeld/policies/key_diff.hpp"
#include "kvmeld/policies/kvmerger.hpp"
#include "kvmeld/policies/kvzip.hpp"
#include "kvmeld/policies/massfold.hpp"
#include "kvmeld/policies/r_kv.hpp"
#include "kvmeld/policies/random_tokens.hpp"
#include "kvmeld/policies/roco.hpp"
#include "kvmeld/policies/scissorhands.hpp"
#include "kvmeld/policies/snapkv.hpp"
#include "kvmeld/policies/streaming_llm.hpp"
#include "kvmeld/policies/tova.hpp"
#include "kvmeld/policies/triattention.hpp"
#include "kvmeld/policies/zsmerge.hpp"
#include "kvmeld/score/attention.hpp"
#include "kvmeld/score/column_scores.hpp"

namespace kvmeld::inline v0 {

/// One of `Policies`, itself a policy. Each call is one switch a head, none a slot.
template <policy... Policies>
class basic_any_policy {
 public:
  /// The alternative `p`.
  template <class P>
  requires(std::same_as<P, Policies> || ...)
      basic_any_policy(P p)  // NOLINT: a policy is one of the alternatives
      : policy_(std::move(p)) {}

  /// The first, with its default parameters.
  basic_any_policy() = default;

  /// One of each, with its default parameters.
  static std::vector<basic_any_policy> every() { return {Policies{}...}; }

  /// What the policy inside says; its default where it omits a member (policy.hpp).
  /// @{
  std::string_view name() const {
    return visit([](const auto& p) { return std::string_view(p.name()); });
  }
  std::vector<slot_stat> slot_stats() const {
    return visit([](const auto& p) { return traits::slot_stats(p); });
  }
  std::size_t memory(index_t dim, index_t group, index_t capacity) const {
    return visit([&](const auto& p) { return traits::memory(p, dim, group, capacity); });
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
  bool shares() const {
    return visit([](const auto& p) { return traits::shares(p); });
  }
  bool evicts() const {
    return visit([](const auto& p) { return traits::evicts(p); });
  }
  bool supports_decode() const {
    return visit([](const auto& p) { return traits::supports_decode(p); });
  }
  attention_support supports() const {
    return visit([](const auto& p) { return traits::supports(p); });
  }
  bool uses_attention() const {
    return visit([](const auto& p) { return traits::uses_attention(p); });
  }
  bool uses_queries() const {
    return visit([](const auto& p) { return traits::uses_queries(p); });
  }
  kvmeld::prompt_use prompt_use() const {
    return visit([](const auto& p) { return traits::prompt_use_of(p); });
  }
  observation_needs needs() const {
    return visit([](const auto& p) { return traits::observation_needs_of(p); });
  }
  /// @}

  /// The plan of the policy inside. All that else runs it over a head visits it.
  void plan(const head_ref& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    hooks(*this).plan(head, state, no_queries, target, work, out);
  }

  /// `f` is called with the policy inside.
  decltype(auto) visit(const auto& f) const { return switch_to<0>(policy_, f); }
  /// The same, for a policy that may be changed.
  decltype(auto) visit(const auto& f) { return switch_to<0>(policy_, f); }

 private:
  /// The alternative `I`, or the last.
  template <std::size_t I>
  static auto& at(auto& policy) {
    return std::get<std::min(I, sizeof...(Policies) - 1)>(policy);
  }
  /// `std::visit` would cost the compiler a table and a function for each of twenty alternatives.
  template <std::size_t I, class V, class F>
  static decltype(auto) switch_to(V& policy, const F& f) {
    switch (policy.index() - I) {
      case 0:
        return f(at<I>(policy));
      case 1:
        return f(at<I + 1>(policy));
      case 2:
        return f(at<I + 2>(policy));
      case 3:
        return f(at<I + 3>(policy));
      case 4:
        return f(at<I + 4>(policy));
      case 5:
        return f(at<I + 5>(policy));
      default:
        if constexpr (I + 7 < sizeof...(Policies)) {
          return switch_to<I + 6>(policy, f);
        } else {
          return f(at<I + 6>(policy));
        }
    }
  }

  std::variant<Policies...> policy_;
};

/// massfold on the policies that it goes with, by name: "snapkv+massfold".
using any_massfold = massfold<basic_any_policy<snapkv, dropkv, h2o, tova, kvzip>>;

/// Every policy of the library.
using any_policy = basic_any_policy<full_cache, streaming_llm, h2o, snapkv, zsmerge, d2o, kvmerger,
                                    ems, keepkv, attention_matching, kvzip, fold, random_tokens,
                                    tova, roco, scissorhands, r_kv, key_diff, expected_attention,
                                    triattention, centroids, compactor, cam, dropkv, any_massfold>;

static_assert(policy<any_policy>);

#ifdef KVMELD_COMPILED  // as the target kvmeld::compiled defines it, which has these
extern template class hooks<any_policy>;
extern template class hooks<full_cache>;
extern template class hooks<streaming_llm>;
extern template class hooks<h2o>;
extern template class hooks<snapkv>;
extern template class hooks<zsmerge>;
extern template class hooks<d2o>;
extern template class hooks<kvmerger>;
extern template class hooks<ems>;
extern template class hooks<keepkv>;
extern template class hooks<attention_matching>;
extern template class hooks<kvzip>;
extern template class hooks<fold>;
extern template class hooks<random_tokens>;
extern template class hooks<tova>;
extern template class hooks<roco>;
extern template class hooks<scissorhands>;
extern template class hooks<r_kv>;
extern template class hooks<key_diff>;
extern template class hooks<expected_attention>;
extern template class hooks<triattention>;
extern template class hooks<centroids>;
extern template class hooks<compactor>;
extern template class hooks<cam>;
extern template class hooks<dropkv>;
extern template class hooks<any_massfold>;
extern template void attend(const head_ref&, const log_mass_of&, const float*, float*,
                            std::span<float>, std::span<float>);
extern template void column_scores(const head_ref&, const query_view<float>&, const column_options&,
                                   const column_sums&);
#endif

namespace detail {

template <class Any, class... Own>
struct with_own;
template <class... Policies, class... Own>
struct with_own<basic_any_policy<Policies...>, Own...> {
  using type = basic_any_policy<Policies..., Own...>;
};

}  // namespace detail

/// These, and `Own`: policies of one's own.
template <policy... Own>
using any_policy_with = typename detail::with_own<any_policy, Own...>::type;

}  // namespace kvmeld::inline v0
