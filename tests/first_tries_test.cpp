// SPDX-License-Identifier: MIT
// What users write first, and what the compiler answers.
#include <catch2/catch.hpp>
#include <concepts>
#include <type_traits>
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/policies/h2o.hpp"

namespace first_tries_test {

using kvmeld::budget;
using kvmeld::cache;
using kvmeld::compressor;
using kvmeld::h2o;

/// A cache that is const is not read by heads: a `head_ref` writes.
template <class Cache>
concept gives_heads = requires(Cache& kv) {
  kv.head(0);
};
static_assert(gives_heads<cache> && gives_heads<kvmeld::strided_cache>);
static_assert(!gives_heads<const cache> && !gives_heads<const kvmeld::strided_cache> &&
              !gives_heads<const kvmeld::paged_cache>);
static_assert(kvmeld::kv_cache<cache> && !kvmeld::kv_cache<const cache>);

/// A number is no budget, a list of two numbers no selection, and a cache must outlive its
/// compressor.
template <class B>
concept is_budget = std::constructible_from<compressor<h2o>, cache&, h2o, B>;
static_assert(is_budget<budget> && is_budget<std::vector<budget>> && !is_budget<int>);
static_assert(!std::is_constructible_v<compressor<h2o>, const cache&, h2o, budget>);
static_assert(!std::is_constructible_v<compressor<h2o>, cache, h2o, budget>);
static_assert(!std::is_constructible_v<kvmeld::head_selection, kvmeld::index_t, kvmeld::index_t>);

TEST_CASE("policies and budgets come in vectors and spans, or are one") {
  cache kv({.kv_heads = 2, .group = 2, .key_dim = 8}, {.capacity = 64});
  std::vector<h2o> policies(2);
  policies[1].sinks = 3;
  std::vector<budget> budgets{{16}, {24}};
  const auto same = [&](const auto& meld, bool other_policy, bool other_budget) {
    static_assert(std::same_as<std::remove_cvref_t<decltype(meld)>, compressor<h2o>>);
    CHECK(meld.policy_of(1).sinks == policies[other_policy ? 1 : 0].sinks);
    CHECK(meld.limit(1).slots ==
          compressor(kv, h2o{}, budgets[other_budget ? 1 : 0]).limit(0).slots);
  };
  same(compressor(kv, policies, budgets), true, true);
  same(compressor(kv, std::span(policies), std::span(budgets)), true, true);
  same(compressor(kv, std::span<const h2o>(policies), std::span<const budget>(budgets)), true,
       true);
  same(compressor<h2o>(kv, policies, budgets), true, true);
  same(compressor(kv, h2o{}, budgets), false, true);
  same(compressor(kv, h2o{}, std::span(budgets)), false, true);
  same(compressor(kv, h2o{}, budget{16}), false, false);
  same(compressor(kv, h2o{}, {.slots = 16}), false, false);
  same(compressor(kv, h2o{}, {.slots = 16}, {.probabilities = true}), false, false);
  same(compressor(kv, policies, budgets, {.probabilities = true}), true, true);
}

}  // namespace first_tries_test
