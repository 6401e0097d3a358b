// SPDX-License-Identifier: MIT
// A policy that says a score and what it protects: plan, victim and least budget follow.
#include <algorithm>  // std::ranges::sort
#include <catch2/catch.hpp>
#include <limits>
#include <vector>

#include "../examples/custom_policy.hpp"
#include "kvmeld/kvmeld.hpp"

namespace scored_policy_test {

using kvmeld::index_t;

/// The position, but for a token whose score is NaN.
struct by_position {
  index_t broken = -1;

  static constexpr std::string_view name() { return "by_position"; }
  kvmeld::protection protects(const kvmeld::head_ref&, index_t target) const {
    return {.sinks = 1, .recent = target / 2};
  }
  float score(const kvmeld::head_ref& head, const kvmeld::head_state&, index_t slot) const {
    const index_t at = head.position(slot);
    return at == broken ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(at);
  }
};

/// Norms of the keys are `norms`, in one dimension.
kvmeld::cache keys_of(const std::vector<float>& norms) {
  kvmeld::cache kv({.kv_heads = 1, .key_dim = 1}, {.capacity = 16});
  kv.append(kv.heads(0, 0), norms, norms, static_cast<index_t>(norms.size()));
  return kv;
}

std::vector<index_t> positions(const kvmeld::head_ref& head) {
  std::vector<index_t> all;
  for (index_t s = 0; s < head.length(); ++s) {
    all.push_back(head.position(s));
  }
  std::ranges::sort(all);
  return all;
}

TEST_CASE("a score and what is protected are a policy", "[policy]") {
  SECTION("after a prompt and in decode") {
    kvmeld::cache kv = keys_of({5, -1, 4, 2, -3, 6});
    kvmeld::compressor meld(kv, custom::lowest_norm{.recent = 1}, {.slots = 3});
    meld.end_prompt(0);
    CHECK(positions(kv.head(0)) == std::vector<index_t>{1, 3, 5});
    const std::vector<float> q{0}, k{0.5F};
    std::vector<float> out(1);
    meld.step(kv.heads(0, 0), {q, k, k}, out);  // 5 is protected no more, and has the highest norm
    CHECK(positions(kv.head(0)) == std::vector<index_t>{1, 3, 6});
  }
  SECTION("NaN ranks last, and what is protected stays") {
    kvmeld::cache kv = keys_of(std::vector<float>(10, 1));
    kvmeld::compressor meld(kv, by_position{.broken = 6}, {.slots = 6});
    meld.end_prompt(0);
    CHECK(positions(kv.head(0)) == std::vector<index_t>{0, 4, 5, 7, 8, 9});
  }
  SECTION("the least budget is one more than what is protected") {
    CHECK(kvmeld::declared(by_position()).min_budget() == 3);
    CHECK(kvmeld::declared(custom::lowest_norm{.recent = 7}).min_budget() == 8);
    CHECK_FALSE(kvmeld::declared(custom::lowest_norm{.recent = 7}).accepts(7));
    kvmeld::cache kv = keys_of({1, 2, 3});
    CHECK_THROWS_WITH(
        kvmeld::compressor(kv, custom::lowest_norm{.recent = 7}, kvmeld::budget{.slots = 7}),
        "kvmeld: lowest_norm: expected a budget of at least 8 slots (protected tokens and one "
        "more), got 7");
  }
}

}  // namespace scored_policy_test
