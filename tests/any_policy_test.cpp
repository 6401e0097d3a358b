// SPDX-License-Identifier: MIT
// any_policy is the policy inside it.
#include <catch2/catch.hpp>
#include <span>
#include <type_traits>  // std::type_identity

#include "support/fixtures.hpp"
#include "support/policies.hpp"

namespace any_policy_test {

using fixtures::index_t;
using kvmeld::budget;

/// LAW: a prompt and some steps, through the policy and through any_policy, to the bit.
template <class Policy>
void same(const Policy& policy) {
  INFO(policy.name());
  const kvmeld::any_policy_or_peer any(policy);
  auto a = fixtures::random_cache(70, 8, 2, 80, 3);
  auto b = a;
  auto state_a = fixtures::make_state(policy, a);
  auto state_b = fixtures::make_state(any, b);
  const auto q = fixtures::normal(70 * 3 * 2 * 8);
  const auto view = kvmeld::prompt_queries(q.data(), 70, 3, 2, 8);
  fixtures::compress(policy, a, state_a, view, budget{30});
  fixtures::compress(any, b, state_b, view, budget{30});
  std::vector<float> out_a(3 * 2 * 8), out_b(out_a);
  for (int t = 0; t < 9; ++t) {
    const auto x = fixtures::normal(48), k = fixtures::normal(24), v = fixtures::normal(24);
    fixtures::step(policy, a, state_a, {x, k, v}, budget{30}, out_a);
    fixtures::step(any, b, state_b, {x, k, v}, budget{30}, out_b);
    CHECK(out_a == out_b);
  }
  for (index_t h = 0; h < 3; ++h) {
    CHECK(fixtures::bytes_of(a.head(h)) == fixtures::bytes_of(b.head(h)));
  }
}

/// Per cent that the state of a head is of its cache: 1024 slots × 128 in float, one query head.
template <class Policy>
double state_size(const Policy& policy) {
  constexpr index_t slots = 1024, dim = 128;
  auto kv = fixtures::random_cache(slots, dim, 1, slots);
  auto state = kvmeld::make_head_state(policy, kv.head(0));
  state.extend(slots);
  return 100 * static_cast<double>(state.bytes()) / (slots * dim * 2 * sizeof(float));
}

/// The bounds of docs/results/cost.md, in per cent.
template <class... Policies>
void small_beside_the_cache(std::type_identity<kvmeld::basic_any_policy<Policies...>>) {
  const auto most = [](std::string_view name) {
    return name == "ems"                  ? 9.1
           : name == "fold"               ? 6.8
           : name == "expected_attention" ? 6.4
           : name == "zsmerge"            ? 1.28
                                          : 1.2;
  };
  const auto check = [&](const auto& policy) {
    INFO(policy.name());
    CHECK(state_size(policy) <= most(policy.name()));
  };
  (check(Policies{}), ...);
}

TEST_CASE("the state of a policy is small beside the cache") {
  small_beside_the_cache(std::type_identity<kvmeld::any_policy_or_peer>());
  CHECK(state_size(kvmeld::keepkv{.variant = kvmeld::keepkv::mode::code}) <= 12.6);
}

TEST_CASE("any_policy is the policy inside it", "[laws]") {
  same(kvmeld::streaming_llm{});                            // measures nothing
  same(kvmeld::zsmerge{.proximity = 0.2F, .residual = 3});  // its removal merges
  same(kvmeld::fold{});                                     // plans on queries
}

TEST_CASE("each head may run its own policy and budget", "[laws]") {
  const std::vector<kvmeld::any_policy_or_peer> policies = {
      kvmeld::full_cache{}, kvmeld::streaming_llm{}, kvmeld::h2o{}, kvmeld::snapkv{.window = 8},
      kvmeld::zsmerge{.residual = 2}};
  const std::vector<budget> budgets = {{1}, {20}, {30}, {40, 44}, {50}};
  auto kv = fixtures::random_cache(60, 8, 2, 100, 5);
  auto state = fixtures::make_state(std::span(policies), kv);
  const auto q = fixtures::normal(60 * 5 * 2 * 8);
  fixtures::compress(std::span(policies), kv, state, kvmeld::prompt_queries(q.data(), 60, 5, 2, 8),
                     std::span(budgets));
  std::vector<float> out(80);
  for (index_t t = 1; t <= 10; ++t) {
    fixtures::step(std::span(policies), kv, state,
                   {fixtures::normal(80), fixtures::normal(40), fixtures::normal(40)},
                   std::span(budgets), out);
    CHECK(kv.head(0).length() == 60 + t);
    CHECK(kv.head(1).length() == 20);
    CHECK(kv.head(2).length() == 30);
    CHECK(kv.head(3).length() == 40 + t % 4);
    CHECK(kv.head(4).length() == 50);
  }
}

}  // namespace any_policy_test
