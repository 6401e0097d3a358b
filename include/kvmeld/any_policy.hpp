// SPDX-License-Identifier: MIT
/// A policy chosen at run time, so that every head of every layer may have its own; and the one
/// list of the policies of policies/, which CMakeLists.txt reads too.
#pragma once

#include <algorithm>  // std::min
#include <concepts>   // std::same_as
#include <string_view>
#include <utility>  // std::move
#include <variant>
#include <vector>

#include "kvmeld/policies/d2o.hpp"
#include "kvmeld/policies/declared.hpp"
#include "kvmeld/policies/ems.hpp"
#include "kvmeld/policies/fold.hpp"
#include "kvmeld/policies/full_cache.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "kvmeld/policies/keepkv.hpp"
#include "kvmeld/policies/kvmerger.hpp"
#include "kvmeld/policies/kvzip.hpp"
#include "kvmeld/policies/massfold.hpp"
#include "kvmeld/policies/snapkv.hpp"
#include "kvmeld/policies/streaming_llm.hpp"
#include "kvmeld/policies/tova.hpp"
#include "kvmeld/policies/zsmerge.hpp"
#include "kvmeld/score/attention.hpp"
#include "kvmeld/score/column_scores.hpp"

namespace kvmeld::inline v0 {

/// One of `Policies`, itself a policy: `declared` says of it what the one inside says. Each call is
/// one switch per head, none per slot.
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

  /// The name of the policy inside.
  std::string_view name() const {
    return visit([](const auto& p) { return std::string_view(p.name()); });
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
using any_massfold = massfold<basic_any_policy<snapkv, h2o, tova, kvzip>>;

/// Those of policies/: what an engine chooses from. <kvmeld/peers.hpp> has others to compare with.
using any_policy = basic_any_policy<full_cache, streaming_llm, h2o, snapkv, zsmerge, d2o, kvmerger,
                                    ems, keepkv, kvzip, fold, tova, any_massfold>;

static_assert(policy<any_policy>);

namespace detail {

template <class Any, class... Own>
struct with_own;
template <class... Policies, class... Own>
struct with_own<basic_any_policy<Policies...>, Own...> {
  using type = basic_any_policy<Policies..., Own...>;
};

}  // namespace detail

/// The choices of `Any`, and `Own`.
template <class Any, policy... Own>
using with_policies = typename detail::with_own<Any, Own...>::type;

/// Those of policies/, and `Own`: policies of one's own.
template <policy... Own>
using any_policy_with = with_policies<any_policy, Own...>;

#ifdef KVMELD_COMPILED  // as the target kvmeld::compiled defines it, which has these
extern template void attend(const head_ref&, const log_mass_of&, const float*, float*,
                            std::span<float>, std::span<float>);
extern template void column_scores(const head_ref&, const query_view<float>&, const column_options&,
                                   const column_sums&);
extern template class declared<any_policy>;
extern template class declared<any_massfold>;
#endif

}  // namespace kvmeld::inline v0

#if defined(KVMELD_COMPILED) && __has_include("kvmeld_compiled/policies.hpp")
#include "kvmeld_compiled/policies.hpp"  // the same of each policy
#endif
