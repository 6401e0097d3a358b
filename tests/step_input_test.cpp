// SPDX-License-Identifier: MIT
// Rows of steps, and queries of prompts, in the engine's own scalar.
#include <catch2/catch.hpp>

#include "kvmeld/peers.hpp"
#include "support/fixtures.hpp"

namespace step_input_test {

using fixtures::normal;
using kvmeld::budget;
using kvmeld::index_t;

constexpr index_t heads = 3, group = 2, dim = 9, tokens = 40, target = 24;  // no whole vectors

/// A prompt in two chunks, and `tokens` steps, whose rows come as `Scalar`, or as the floats that
/// these are; gives all outputs and what the cache holds at the end.
template <class Cache, class Scalar, class Given>
std::vector<float> decoded(const kvmeld::any_policy_or_peer& policy) {
  fixtures::random_bits().seed(7);
  Cache kv({.heads = heads, .group = group, .dim = dim, .capacity = 100});
  kvmeld::compressor meld(kv, policy,
                          budget{std::max(target, kvmeld::declared(policy).min_budget())});
  std::vector<float> all, out(heads * group * dim);
  const auto given = [](std::size_t n) {
    const auto x = normal(static_cast<index_t>(n));
    std::vector<Given> as(n);
    std::ranges::transform(x, as.begin(), [](float f) {
      return static_cast<Given>(static_cast<float>(static_cast<Scalar>(f)));
    });
    return as;
  };
  for (const index_t chunk : {40, 15}) {  // of more queries than windows have
    kv.append(kv.heads(0, 0), normal(chunk * heads * dim), normal(chunk * heads * dim), chunk);
    meld.prompt(kv.heads(0, 0), kvmeld::queries(given(kvmeld::as_size(chunk) * heads * group * dim),
                                                chunk, kv.spec()));
  }
  meld.end_prompt(0);
  for (index_t t = 0; t < tokens && kvmeld::declared(policy).supports_decode(); ++t) {
    const auto q = given(heads * group * dim), k = given(heads * dim), v = given(heads * dim);
    meld.step(kv.heads(0, 0), {.q = q, .k = k, .v = v}, out);
    all.insert(all.end(), out.begin(), out.end());
  }
  for (index_t h = 0; h < heads; ++h) {
    const auto bytes = fixtures::bytes_of(kv.head(h));
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

TEMPLATE_TEST_CASE("rows and queries in 16 bits are the floats that they stand for", "[step][half]",
                   Eigen::half, Eigen::bfloat16) {
  for (const auto& p : kvmeld::any_policy_or_peer::every()) {
    INFO(p.name());
    CHECK(decoded<fixtures::cache<float>, TestType, TestType>(p) ==
          decoded<fixtures::cache<float>, TestType, float>(p));
    CHECK(decoded<fixtures::cache<TestType>, TestType, TestType>(p) ==
          decoded<fixtures::cache<TestType>, TestType, float>(p));
  }
}

TEST_CASE("keys and values of the cache's scalar are stored as they came", "[step][half]") {
  using half = Eigen::half;
  fixtures::cache<half> kv({.heads = 1, .dim = 5, .capacity = 3});
  kvmeld::compressor meld(kv, kvmeld::full_cache{}, budget{3});
  const std::vector<half> k = {half(1e-7F), half(-0.0F), half(65504), half(1) / half(3), half(2)},
                          v = {half(6e-8F), half(0.1F), half(-65504), half(-7), half(0)};
  std::vector<float> out(5);
  meld.step(kv.heads(0, 0), {.q = k, .k = k, .v = v}, out);
  for (index_t i = 0; i < 5; ++i) {
    CHECK(kv.head(0).key(0)[i].x == k[static_cast<std::size_t>(i)].x);
    CHECK(kv.head(0).value(0)[i].x == v[static_cast<std::size_t>(i)].x);
  }
}

}  // namespace step_input_test
