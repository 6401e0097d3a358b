// SPDX-License-Identifier: MIT
// KVMerger against its oracle; budgets met exactly; the runs and weights by hand.
#include "kvmeld/policies/kvmerger.hpp"

#include <catch2/catch.hpp>

#include "support/agree.hpp"

using fixtures::index_t;
using kvmeld::budget;
using kvmeld::kvmerger;

namespace {

/// Policy and oracle with the same parameters.
std::pair<kvmerger, oracle::kvmerger> both(kvmerger p) {
  oracle::kvmerger o{.epsilon = p.epsilon, .recent = p.recent, .heavy = p.heavy};
  o.joins = p.joins == kvmerger::mode::budget ? oracle::kvmerger::mode::budget
                                              : oracle::kvmerger::mode::threshold;
  o.sinks = p.sinks;
  o.sigma = p.sigma;
  o.scale_values = p.scale_values;
  o.gaps_break = p.gaps_break;
  return {p, o};
}

}  // namespace

TEST_CASE("kvmerger is its oracle", "[oracle]") {
  using enum kvmerger::mode;
  const kvmerger table[] = {
      {},
      {.joins = threshold, .epsilon = 0.3F},
      {.joins = threshold},
      {.recent = 0.05F, .heavy = 0.5F, .sinks = 0, .scale_values = false},
      {.recent = 0.1F, .heavy = 0, .sinks = 2, .sigma = 5, .gaps_break = false}};
  for (const kvmerger& p : table) {
    INFO("recent " << p.recent << ", epsilon " << p.epsilon << ", threshold "
                   << (p.joins == threshold));
    const auto [policy, o] = both(p);
    for (const auto& s : fixtures::settings) {
      fixtures::agree(policy, o, s, 1e-4);
    }
  }
  const auto [policy, o] = both({});
  fixtures::agree<Eigen::half>(policy, o, {100, 16, 2, 40, 20}, 2e-2);
  fixtures::agree<Eigen::bfloat16>(policy, o, {100, 16, 2, 40, 20}, 1e-1);
}

TEST_CASE("kvmerger hits every budget from its least to all tokens", "[kvmerger]") {
  const index_t tokens = 60;
  const auto kv = fixtures::random_cache(tokens, 8, 2);
  const fixtures::queries queries(tokens, 2, 8);
  for (const bool gaps_break : {true, false}) {
    const kvmerger policy{.gaps_break = gaps_break};
    for (index_t target = policy.min_budget(); target <= tokens; ++target) {
      auto copy = kv;
      auto state = fixtures::make_state(policy, copy);
      fixtures::compress(policy, copy, state, queries.view(), budget{target});
      CHECK(copy.head(0).length() == target);
    }
  }
}

TEST_CASE("kvmerger's threshold merges what is alike into one slot, and never keeps too much",
          "[kvmerger]") {
  // Two runs of four equal keys between unlike ones; only the last token is protected.
  fixtures::cache<float> kv{{.heads = 1, .dim = 2, .capacity = 12}};
  std::vector<float> k, v;
  for (const float angle : {0.0F, 2.0F, 2.0F, 2.0F, 2.0F, 4.0F, 1.0F, 1.0F, 1.0F, 1.0F, 3.0F}) {
    k.insert(k.end(), {std::cos(angle), std::sin(angle)});
    v.insert(v.end(), {1, angle});
  }
  kv.append(0, k, v);
  const kvmerger policy{.joins = kvmerger::mode::threshold, .recent = 0, .heavy = 0, .sinks = 0};
  auto state = fixtures::make_state(policy, kv);
  fixtures::compress(policy, kv, state, fixtures::queries(11, 1, 2).view(), budget{8});
  const auto head = kv.head(0);
  REQUIRE(head.length() == 5);
  const float values[] = {0, 8, 4, 4, 3};  // four equal values, scaled by four
  for (index_t s = 0; s < 5; ++s) {
    CHECK(head.value(s)[1] == Approx(values[s]));
    CHECK(head.log_mass(s) == 0);
  }
}

TEST_CASE("kvmerger's weights are a Gaussian around the pivot", "[kvmerger]") {
  fixtures::cache<float> kv{{.heads = 1, .dim = 2, .capacity = 3}};
  kv.append(0, std::vector<float>{1, 0, 1, 1, 3, 0}, std::vector<float>{1, 1, 2, 2, 3, 3});
  kvmerger policy{.recent = 0, .heavy = 0, .sinks = 0};
  auto state = fixtures::make_state(policy, kv);
  state[0].extend(3);
  const float scores[] = {5, 1, 1};
  std::ranges::copy(scores, state[0].column(kvmerger::score).begin());
  kvmeld::slot_scratch scratch;
  kvmeld::merge_plan plan;
  const auto weights = [&] {
    policy.plan(kv.head(0), state[0], 1, scratch, plan);
    REQUIRE(plan.rows() == 1);
    CHECK(plan.anchor(0) == 0);
    return plan.row(0);
  };
  // Distances 0, 1, 2: their mean is 1, so 2 sigma^2 is 1.
  double sum = 1 + std::exp(-1.0) + std::exp(-4.0);
  CHECK(weights()[1].key_weight == Approx(std::exp(-1.0) / sum));
  CHECK(weights()[2].value_weight == Approx(3 * std::exp(-4.0) / sum));
  policy.sigma = 5, policy.scale_values = false;
  sum = 1 + std::exp(-1.0 / 50) + std::exp(-4.0 / 50);
  CHECK(weights()[2].key_weight == Approx(std::exp(-4.0 / 50) / sum));
  CHECK(weights()[2].value_weight == weights()[2].key_weight);
}

TEST_CASE("kvmerger decodes with slack: it compresses now and then", "[kvmerger]") {
  const kvmerger policy;
  const index_t slots = 64;
  const budget b = kvmeld::budget_within(policy, slots);
  CHECK(b.slots == 61);
  CHECK(b.trigger == 65);
  auto kv = fixtures::random_cache(slots, 4, 1, slots + 1);
  auto state = fixtures::make_state(policy, kv);
  std::vector<float> out(4);
  int compressed = 0;
  for (int t = 0; t < 40; ++t) {
    const index_t before = kv.head(0).length();
    fixtures::step(policy, kv, state,
                   {fixtures::normal(4), fixtures::normal(4), fixtures::normal(4)}, b, out);
    CHECK(kv.head(0).length() <= slots);
    compressed += kv.head(0).length() <= before ? 1 : 0;
  }
  CHECK(compressed == 10);
}

TEST_CASE("kvmerger refuses parameters out of range", "[errors]") {
  const std::pair<kvmerger, const char*> bad[] = {
      {{.epsilon = 2}, "an epsilon in [-1, 1]"},
      {{.recent = 0.5F, .heavy = 0.5F}, "of at least 0 and together below 1, got 0.5 and 0.5"},
      {{.sinks = -1}, "sinks, got -1"},
      {{.sigma = -1}, "a finite sigma of at least 0"},
      {{.period = -1}, "slots freed at once, got -1"}};
  for (const auto& [policy, message] : bad) {
    CHECK_THROWS_WITH(policy.validate(), Catch::Contains(message));
  }
}
