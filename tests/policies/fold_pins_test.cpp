// SPDX-License-Identifier: MIT
// fold in decode: whatever its parameters, the pinned slots leave one to merge into.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <set>
#include <vector>

#include "kvmeld/memory/cache.hpp"
#include "kvmeld/policies/fold.hpp"
#include "support/all_heads.hpp"
#include "support/random.hpp"
#include "support/typed_cache.hpp"

namespace fold_pins_test {

using kvmeld::budget;
using kvmeld::fold;
using kvmeld::index_t;

constexpr index_t dim = 2;

std::vector<float> normal(index_t n) {
  std::normal_distribution<float> gauss;
  std::vector<float> x(static_cast<std::size_t>(n));
  std::ranges::generate(x, [&] { return gauss(streams::floats); });
  return x;
}

/// Calls `f` with a policy and the most slots of a head, for parameters up to their ends.
template <class F>
void sweep(F f) {
  const float almost_all = std::nextafter(1.0F, 0.0F);
  for (const auto pins : {fold::pin_rule::leverage, fold::pin_rule::scores}) {
    for (const index_t period : {0, 1, 5, 20, 32, 33, 63, 64, 1000}) {
      for (const float share : {0.0F, 0.5F, 0.9F, almost_all}) {
        for (const float recent_share : {0.0F, 0.25F, 1.0F}) {
          for (const index_t sinks : {0, 4, 20}) {
            fold policy{.sinks = sinks, .recent_share = recent_share, .share = share};
            policy.pins = pins, policy.score_share = share, policy.decode.period = period;
            policy.decode.queries = 2;
            validate(policy);
            for (const index_t slots : {0, 64, 211}) {
              f(policy, std::max(slots, kvmeld::declared(policy).min_budget() + 1));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("fold's pins fit in the target, with a slot for what is merged", "[fold]") {
  sweep([](const fold& policy, index_t slots) {
    const index_t target = kvmeld::budget_within(policy, slots).slots;
    CAPTURE(slots, target, policy.decode.period, policy.share, policy.recent_share, policy.sinks);
    for (const index_t most : {target, slots}) {
      auto pins = policy.pinned().decode_by_leverage(most, target);
      REQUIRE(std::min(pins.latest, pins.others) >= 0);
      REQUIRE(policy.sinks + pins.latest + pins.others < target);
      for (const index_t scored : {0, 7, 100}) {
        pins = policy.pinned().decode(most, target, scored, 100);
        REQUIRE(std::min({pins.latest, pins.scored, pins.others}) >= 0);
        const bool by_scores = policy.pins == fold::pin_rule::scores;  // else the budget is another
        REQUIRE(
            (!by_scores || policy.sinks + pins.latest + pins.scored + pins.others <= target - 2));
      }
    }
  });
}

TEST_CASE("fold decodes at every period, share, window and number of sinks", "[fold]") {
  sweep([](const fold& policy, index_t slots) {
    const budget b = kvmeld::budget_within(policy, slots);
    CAPTURE(slots, b.slots, policy.decode.period, policy.share, policy.recent_share, policy.sinks);
    fixtures::cache<float> kv{{.heads = 1, .group = 1, .dim = dim, .capacity = slots + 1}};
    auto state = fixtures::make_state(policy, kv);
    kv.append(0, normal(slots * dim), normal(slots * dim));
    const auto head = kv.head(0);
    std::vector<float> out(dim);
    for (index_t plans = 0, t = slots; plans < 2; ++t) {
      fixtures::step(policy, kv, state, {normal(dim), normal(dim), normal(dim)}, b, out);
      REQUIRE(head.length() <= slots);
      plans += head.length() == b.slots ? 1 : 0;
      REQUIRE(t < 3 * slots);
    }
    std::set<index_t> positions;
    for (index_t s = 0; s < head.length(); ++s) {
      positions.insert(head.position(s));
      REQUIRE(std::isfinite(head.log_mass(s)));
      REQUIRE(std::isfinite(head.key(s)[0] + head.value(s)[1]));
    }
    REQUIRE(static_cast<index_t>(positions.size()) == b.slots);
    for (index_t s = 0; s < policy.sinks; ++s) {
      REQUIRE(positions.contains(s));
    }
  });
}

}  // namespace fold_pins_test
