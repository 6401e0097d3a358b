// SPDX-License-Identifier: MIT
/// What a policy is given of the engine's attention.
#pragma once

#include <algorithm>  // std::ranges::max_element
#include <cmath>      // std::log
#include <concepts>   // std::same_as
#include <optional>
#include <span>

#include "kvmeld/any_policy.hpp"
#include "kvmeld/score/dot.hpp"
#include "kvmeld/score/reference.hpp"

namespace kvmeld::llama {

namespace detail {

template <class P>
concept one_of_several = requires(const P& p) {
  p.visit([](const auto&) {});
};
template <class P, class... Policies>
concept one_of = (std::same_as<P, Policies> || ...);

}  // namespace detail

/// Calls `f(mass, own)` with the policy's mass function; `own`: it is not just log-mass.
template <policy P, class F>
void with_mass(const P& p, const kv_head auto& head, const head_state& state, F f) {
  if constexpr (detail::one_of_several<P>) {
    p.visit([&](const auto& one) { with_mass(one, head, state, f); });
  } else if constexpr (requires { p.mass(head, state); }) {
    f(p.mass(head, state), true);
  } else {
    f(log_mass_of<std::remove_cvref_t<decltype(head)>>{head}, false);
  }
}

/// The engine's softmax `p [group, length]` leaves no log-sum-exp: it is the logit of each query
/// head's likeliest slot, less the logarithm of its probability. `q [group, dim]`, `out [group]`.
template <policy P>
void log_sum_exp_of(const P& policy, const kv_head auto& head, const head_state& state,
                    std::span<const float> p, const float* q, std::span<float> out) {
  const auto n = static_cast<std::size_t>(head.length());
  with_mass(policy, head, state, [&](const auto& mass, bool) {
    for (index_t g = 0; g < head.group(); ++g) {
      const auto row = p.subspan(static_cast<std::size_t>(g) * n, n);
      const auto best = std::ranges::max_element(row);
      const auto s = static_cast<index_t>(best - row.begin());
      const kvmeld::row<const float> query{q + std::ptrdiff_t{g} * head.dim()};
      const float dot = score::dot(query, head.key(s), head.dim());
      out[static_cast<std::size_t>(g)] = mass(s, dot) - std::log(*best);
    }
  });
}

/// Does the policy have a mass function of its own?
template <policy P>
bool has_mass(const P& p) {
  if constexpr (detail::one_of_several<P>) {
    return p.visit([](const auto& one) { return has_mass(one); });
  } else {
    return requires(const head_ref& head, const head_state& state) { p.mass(head, state); };
  }
}

/// Does the policy move keys or queries in position?
template <policy P>
bool rotates(const P& p) {
  if constexpr (detail::one_of_several<P>) {
    return p.visit([](const auto& one) { return rotates(one); });
  } else if constexpr (std::same_as<P, streaming_llm>) {
    return p.positions != streaming_llm::position_mode::original;
  } else if constexpr (std::same_as<P, ems>) {
    return !p.with_position;
  } else {
    return detail::one_of<P, fold, compactor, expected_attention>;
  }
}

/// Refuses a policy that moves keys or queries, where the engine's rotation is not known.
template <policy P>
void expect_rotation(const P& p, const std::optional<rotary>& known) {
  expects(known.has_value() || !rotates(p), p.name(),
          ": expected a rotation of the whole head by one base, or Llama 3's, the same in every "
          "layer that is compressed (it rotates keys or queries), got a RoPE that is scaled or "
          "partial, or not there in some layers (which can be left untouched)");
}

/// What a policy that plans on queries measures a micro-batch's slots on, made of the micro-batch's
/// own queries; none, if it takes them all.
template <policy P>
std::optional<reference_queries> reference_of(const P& p, kv_cache auto& kv,
                                              const query_view<float>& own) {
  const prompt_use use = traits::prompt_use_of(p);
  switch (use.plans) {
    case prompt_use::planned::lookahead:
      return foresight(kv, own, {.count = use.count, .ahead = use.positions});
    case prompt_use::planned::spread:
      return spread(kv, own, use.count);
    default:
      return std::nullopt;
  }
}

}  // namespace kvmeld::llama
