// SPDX-License-Identifier: MIT
// A plan for one slot less: which slot goes, whatever the keys and scores, and what it gives away.
#include <algorithm>
#include <catch2/catch.hpp>
#include <limits>
#include <set>

#include "kvmeld/peers/cam.hpp"
#include "kvmeld/peers/centroids.hpp"
#include "kvmeld/peers/key_diff.hpp"
#include "kvmeld/peers/roco.hpp"
#include "support/agree.hpp"

namespace one_slot_less_test {

using fixtures::index_t;
using kvmeld::budget;

std::set<index_t> positions(const fixtures::head_view<float>& head) {
  std::set<index_t> all;
  for (index_t s = 0; s < head.length(); ++s) {
    all.insert(head.position(s));
  }
  return all;
}

/// The plan for one slot less.
kvmeld::merge_plan plan_of(const kvmeld::any_policy_or_peer& policy,
                           const fixtures::head_view<float>& head,
                           const kvmeld::head_state& state) {
  kvmeld::slot_scratch scratch;
  kvmeld::merge_plan plan;
  kvmeld::plan(policy, head, state, head.length() - 1, scratch, plan);
  return plan;
}
/// The slot that goes.
index_t gone(const kvmeld::merge_plan& plan) {
  index_t s = 0;
  while (s < plan.rows() && plan.anchor(s) == s) {
    ++s;
  }
  return s;
}

TEST_CASE("broken keys leave first, and of equal ones the last slot", "[key_diff]") {
  const float odd = GENERATE(std::numeric_limits<float>::quiet_NaN(),
                             std::numeric_limits<float>::infinity(), 0.0F);
  const kvmeld::key_diff policy;
  auto kv = fixtures::random_cache(31, 8, 1);
  auto state = fixtures::make_state(policy, kv);
  state[0].extend(31);
  for (index_t s = 0; s < 31; ++s) {
    if (odd == 0 || s == 15) {
      std::fill_n(kv.head(0).key(s).data, 8, odd);
    }
  }
  CHECK(gone(plan_of(policy, kv.head(0), state[0])) == (odd == 0 ? 30 : 15));
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
  CHECK(gone(plan_of(policy, kv.head(0), state[0])) == 9);  // ten vary more: 10 to 19
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
    const kvmeld::merge_plan plan = plan_of(policy, kv.head(0), state[0]);
    CHECK(gone(plan) == 4);
    int rows = 0;
    for (index_t r = 0; r < plan.rows(); ++r) {
      rows += std::ranges::any_of(plan.value_correction(r), [](float x) { return x != 0; }) ? 1 : 0;
    }
    return rows;
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

}  // namespace one_slot_less_test
