// SPDX-License-Identifier: MIT
// The least budget of policies that protect a share of it: found without trying them one by one.
#include <catch2/catch.hpp>
#include <limits>

#include "kvmeld/policies/fold.hpp"
#include "kvmeld/policies/full_cache.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "kvmeld/policies/keepkv.hpp"
#include "kvmeld/policies/kvmerger.hpp"
#include "kvmeld/policies/zsmerge.hpp"
#include "kvmeld/search/select.hpp"
#include "support/all_heads.hpp"
#include "support/random.hpp"

namespace least_target_test {

using kvmeld::index_t;
using kvmeld::share_of;
using kvmeld::search::least_target;

/// Shares of every kind: round ones, those next to 1 and to 0, and some between.
std::vector<float> shares() {
  std::vector<float> all = {0, 0.25F, 0.5F, 0.75F, 1.0F / 3, 0.1F, 0.9F, 0.99F};
  for (int e = 3; e <= 24; ++e) {
    all.push_back(1 - std::ldexp(1.0F, -e));
    all.push_back(std::ldexp(1.0F, -e));
  }
  std::uniform_real_distribution<float> uniform;
  for (int i = 0; i < 20; ++i) {
    all.push_back(uniform(streams::floats));
    all.push_back(1 - std::ldexp(uniform(streams::floats), -4 - i % 20));
  }
  std::erase_if(all, [](float s) { return s >= 1; });
  return all;
}

/// Does a head of at most 2^20 slots do? Beyond, whether the compiler fuses product and sum decides
/// what a share is rounded to.
bool within(float share, index_t others) {
  constexpr double most = 1 << 20;
  return (others + 1) / (1 - double{share}) < most;
}

TEST_CASE("the least target by a share is what trying them one by one finds", "[select]") {
  for (const float share : shares()) {
    for (const index_t others : {0, 1, 4, 4097}) {
      for (const index_t first : {1, others + 2}) {
        if (!within(share, others)) {
          continue;
        }
        const index_t slow =
            least_target(first, [&](index_t t) { return others + share_of(share, t) <= t; });
        if (least_target(first, share, others) != slow) {
          CAPTURE(share, others, first);
          CHECK(least_target(first, share, others) == slow);
        }
      }
    }
  }
  SUCCEED();
}

TEST_CASE("policies' least budgets are those that fit first", "[select]") {
  for (const float share : shares()) {
    for (const index_t sinks : {0, 4, 30}) {
      if (!within(share, sinks + 8)) {
        continue;
      }
      CAPTURE(share, sinks);
      const auto slow = [](index_t first, auto fits) { return least_target(first, fits); };
      const auto beside_sinks = [&](index_t t) { return sinks + share_of(share, t) <= t; };
      REQUIRE(kvmeld::declared(kvmeld::h2o{.recent = share, .sinks = sinks}).min_budget() ==
              slow(1, beside_sinks));
      REQUIRE(kvmeld::declared(kvmeld::keepkv{.sinks = sinks, .recent = share}).min_budget() ==
              slow(sinks + 1, beside_sinks));
      REQUIRE(kvmeld::declared(kvmeld::zsmerge{.proximity = share, .residual = 3, .sinks = sinks})
                  .min_budget() == slow(sinks + 6, [&](index_t t) {
                return t - std::max(index_t{2}, share_of(share, t)) - 3 > sinks;
              }));
      for (const index_t recent : {0, 24, 5000}) {
        const index_t wanted = slow(sinks + 2, [&](index_t t) {
          return sinks + std::min(share_of(share, t), recent) + 2 <= t;
        });
        REQUIRE(
            kvmeld::declared(kvmeld::fold{.sinks = sinks, .recent = recent, .recent_share = share})
                .min_budget() == wanted);
      }
      const kvmeld::kvmerger two{.recent = share / 2, .heavy = share / 2, .sinks = sinks};
      const index_t least = kvmeld::declared(two).min_budget();
      for (const index_t t :
           {index_t{1}, sinks, sinks + 1, least - 1, least, least + 1, 2 * least}) {
        REQUIRE(kvmeld::declared(two).accepts(t) == (t >= least));
      }
    }
  }
}

TEST_CASE("a budget of all positions has no slot after it", "[select][errors]") {
  constexpr index_t last = std::numeric_limits<index_t>::max();
  CHECK(kvmeld::budget{last}.trigger_length() == last);
  CHECK(kvmeld::budget{last - 1}.trigger_length() == last);
  CHECK(kvmeld::budget{7}.trigger_length() == 8);
  CHECK(kvmeld::budget{7, 9}.trigger_length() == 9);
  const kvmeld::full_cache policy;
  kvmeld::cache kv({.kv_heads = 1, .key_dim = 4}, {.capacity = 16});
  auto state = fixtures::make_state(policy, kv);
  const std::vector<float> x(4, 1.0F);
  std::vector<float> out(4);
  CHECK_NOTHROW(fixtures::step(policy, kv, state, {x, x, x}, kvmeld::budget{last}, out));
  CHECK(kv.head(0).length() == 1);
  CHECK(kvmeld::budget_within(policy, last).trigger_length() == last);
}

}  // namespace least_target_test
