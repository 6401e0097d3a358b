// SPDX-License-Identifier: MIT
// One slot is removed in a decode step: the one that a plan would take, whatever the keys and
// scores.
#include <algorithm>
#include <catch2/catch.hpp>
#include <limits>
#include <set>

#include "kvmeld/kvmeld.hpp"
#include "support/agree.hpp"

namespace slot_removal_test {

using fixtures::index_t;
using kvmeld::budget;

std::set<index_t> positions(const fixtures::head_view<float>& head) {
  std::set<index_t> all;
  for (index_t s = 0; s < head.length(); ++s) {
    all.insert(head.position(s));
  }
  return all;
}

TEST_CASE("the slot removed in a decode step is the one that a plan would take", "[law]") {
  fixtures::removes_as_planned(kvmeld::roco{}, 30, 8, 60);
  fixtures::removes_as_planned(kvmeld::roco{.sinks = 0, .window = 2, .steady = 0.9F}, 17, 33, 60);
  fixtures::removes_as_planned(kvmeld::roco{.sinks = 0, .window = 0, .steady = 0}, 17, 3, 30);
  fixtures::removes_as_planned(kvmeld::key_diff{}, 30, 8, 60);
  fixtures::removes_as_planned(kvmeld::key_diff{.sinks = 0, .window = 9}, 17, 33, 60);
  fixtures::removes_as_planned(kvmeld::centroids{.window = 10}, 60, 8, 29);
  fixtures::removes_as_planned(kvmeld::centroids{.sinks = 0, .window = 3}, 41, 33, 19);
  fixtures::removes_as_planned(kvmeld::cam{}, 30, 8, 90);
  fixtures::removes_as_planned(kvmeld::cam{.sinks = 0, .merge = 3}, 17, 33, 90);
  fixtures::removes_as_planned(kvmeld::ems{.window = 5, .gamma = 1.5F, .threshold = -1}, 30, 8, 90);
  fixtures::removes_as_planned(kvmeld::ems{.window = 3, .sinks = 0, .threshold = 0.1F}, 17, 33, 90);
  fixtures::removes_as_planned(kvmeld::cam{.merge = 1}, 17, 8, 60);  // one slot takes all
}

TEST_CASE("broken and zero keys leave in a step as they do by a plan", "[key_diff]") {
  const float odd = GENERATE(std::numeric_limits<float>::quiet_NaN(),
                             std::numeric_limits<float>::infinity(), 0.0F);
  const bool all = odd == 0;
  const kvmeld::key_diff policy;
  auto kv = fixtures::random_cache(30, 8, 1);
  auto planned = kv;
  auto state = fixtures::make_state(policy, kv), planned_state = state;
  std::vector<float> out(8);
  index_t broken = -1;
  for (int t = 0; t < 8; ++t) {
    if (t == 4) {  // when the step's guesses are near
      broken = *std::next(positions(kv.head(0)).begin(), 15);
      for (const auto& head : {kv.head(0), planned.head(0)}) {
        for (index_t s = 0; s < 30; ++s) {
          if (all || head.position(s) == broken) {
            std::fill_n(head.key(s).data, 8, odd);
          }
        }
      }
    }
    const auto k = fixtures::normal(8, all && t >= 4 ? 0.0F : 1.0F), v = fixtures::normal(8);
    const auto step = [&] {
      fixtures::step(policy, kv, state, {fixtures::normal(8), k, v}, budget{30}, out);
    };
    planned.head(0).push(k.data(), v.data());
    if (!all && t >= 4) {  // attention over it is NaN: a step is refused, a plan removes the slot
      CHECK_THROWS_AS(step(), kvmeld::error);
      fixtures::compress(policy, planned, planned_state, kvmeld::no_queries, budget{30});
      CHECK(!positions(planned.head(0)).contains(broken));
      return;
    }
    step();
    fixtures::compress(policy, planned, planned_state, kvmeld::no_queries, budget{30});
    REQUIRE((positions(kv.head(0)) == positions(planned.head(0)) || (all && t >= 4)));
    CHECK((t < 4 || all || !positions(kv.head(0)).contains(broken)));
    CHECK((t < 4 || !all || !positions(kv.head(0)).contains(30 + t)));  // of equals the last slot
  }
}

TEST_CASE("roco's next among equal means is the one before, however many vary", "[roco]") {
  const kvmeld::roco policy{.sinks = 0, .window = 0, .steady = 0.5F};
  auto kv = fixtures::random_cache(20, 4, 1);
  auto state = fixtures::make_state(policy, kv);
  state[0].extend(20);
  for (std::size_t s = 0; s < 20; ++s) {
    state[0].column(kvmeld::roco::mean)[s] = 1;
    state[0].column(kvmeld::roco::squares)[s] = static_cast<float>(s);
    state[0].column(kvmeld::roco::queries_seen)[s] = 10;
  }
  CHECK(policy.choose_victim(kv.head(0), state[0], 19, {}).removed ==
        9);  // ten vary more: 10 to 19
}

TEST_CASE("cam gives away by the latest step's attention alone, and none of a prompt", "[cam]") {
  const kvmeld::cam policy;
  auto kv = fixtures::random_cache(40, 8, 2);
  auto state = fixtures::make_state(policy, kv);
  const fixtures::queries prompt(40, 2, 8);
  const auto observe = [&](float of_next) {
    std::vector<float> p(80, 0.01F);
    p[4] = p[44] = of_next;  // the first that leaves
    kvmeld::observe(policy, kv.head(0), state[0], state.workspace(), {.probabilities = p});
  };
  const auto shared = [&] {
    const auto one = policy.choose_victim(kv.head(0), state[0], 39, {});
    CHECK(one.removed == 4);
    return one.share_count;
  };
  kvmeld::observe(policy, kv.head(0), state[0], prompt.view());
  CHECK(shared() == 0);
  observe(0.02F);  // twice the mean of those behind it
  CHECK(shared() == 32);
  observe(0);
  CHECK(shared() == 0);
  observe(std::numeric_limits<float>::quiet_NaN());
  CHECK(shared() == 0);
  observe(0.02F);
  kvmeld::observe(policy, kv.head(0), state[0], prompt.view());
  CHECK(shared() == 0);
}

TEST_CASE("centroids takes more than half a budget of new tokens for a prompt", "[centroids]") {
  const index_t new_tokens = GENERATE(15, 16);
  const kvmeld::centroids policy{.window = 8};
  auto kv = fixtures::random_cache(30, 8, 1, 60);
  auto state = fixtures::make_state(policy, kv);
  fixtures::compress(policy, kv, state, kvmeld::no_queries, budget{30});
  kv.append(0, fixtures::normal(new_tokens * 8), fixtures::normal(new_tokens * 8));
  fixtures::compress(policy, kv, state, kvmeld::no_queries, budget{30});
  REQUIRE(kv.head(0).length() == 30);
  std::set<index_t> early;  // where tokens join one after another, the earliest slots stay
  for (index_t s = 0; s < 22; ++s) {
    early.insert(s);
  }
  const auto kept = positions(kv.head(0));
  CHECK(std::ranges::includes(kept, early) == (new_tokens == 15));
}

TEST_CASE("a removal's key weights are its values' unless they are given, whatever they are",
          "[plan]") {
  const auto merged = [](const kvmeld::slot_removal& d) {
    fixtures::cache<float> kv{{.heads = 1, .dim = 1, .capacity = 2}};
    kv.append(0, std::vector<float>{1, 3}, std::vector<float>{8, 16});
    apply(d, kv.head(0));
    REQUIRE(kv.head(0).length() == 1);
    CHECK(kv.head(0).value(0)[0] == 10);
    return kv.head(0).key(0)[0];
  };
  kvmeld::slot_removal d{.removed = 1, .into = 0, .kept_weight = 0.75F, .removed_weight = 0.25F};
  CHECK(merged(d) == 1.5F);
  d.kept_key_weight = 0.0F;
  CHECK(merged(d) == 0.75F);
  d.removed_key_weight = 2.0F;
  CHECK(merged(d) == 6);
  d.removed_key_weight = std::numeric_limits<float>::quiet_NaN();  // not a word for "not given"
  CHECK(std::isnan(merged(d)));
}

}  // namespace slot_removal_test
