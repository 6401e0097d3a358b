// SPDX-License-Identifier: MIT
// KVMerger against its oracle; budgets met exactly; the runs and weights by hand.
#include "kvmeld/policies/kvmerger.hpp"

#include <catch2/catch.hpp>
#include <limits>

#include "kvmeld/compressor.hpp"
#include "support/agree.hpp"

namespace kvmerger_test {

using fixtures::index_t;
using kvmeld::budget;
using kvmeld::kvmerger;

/// Policy and oracle with the same parameters.
std::pair<kvmerger, oracle::kvmerger> both(kvmerger p) {
  oracle::kvmerger o{.epsilon = p.epsilon, .recent = p.recent, .heavy = p.heavy};
  o.joins = p.joins == kvmerger::mode::budget ? oracle::kvmerger::mode::budget
                                              : oracle::kvmerger::mode::threshold;
  o.sinks = p.sinks;
  o.sigma = p.sigma;
  o.scale_values = p.scale_values;
  o.gaps_break = p.gaps_break;
  o.share_slots = p.share_slots;
  return {p, o};
}

TEST_CASE("slots to share are those of the last call", "[kvmerger][errors]") {
  const auto again = kvmeld::kvmerger{}.sharing(1000).sharing(100);
  CHECK(kvmeld::declared(again).min_budget() == kvmeld::kvmerger{}.sharing(100).min_budget());
  kvmeld::kvmerger many{.sinks = 32};
  many.share_slots = 1;
  CHECK_THROWS_WITH(many.sharing(40), Catch::Contains("more slots to share than 42"));
}

TEST_CASE("kvmerger is its oracle", "[oracle]") {
  using enum kvmerger::mode;
  const kvmerger table[] = {
      {},
      {.joins = threshold, .epsilon = 0.3F},
      {.joins = threshold},
      {.recent = 0.05F, .heavy = 0.5F, .sinks = 0},
      {.recent = 0.1F, .heavy = 0, .sinks = 2, .sigma = 5, .gaps_break = false},
      kvmerger{}.sharing(20)};
  for (std::size_t i = 0; i < 2 * std::size(table); ++i) {
    kvmerger p = table[i / 2];
    p.scale_values = i % 2 != 0;
    INFO("recent " << p.recent << ", epsilon " << p.epsilon << ", threshold "
                   << (p.joins == threshold) << ", values scaled " << p.scale_values);
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
    for (index_t target = kvmeld::declared(policy).min_budget(); target <= tokens; ++target) {
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
  const bool scaled = GENERATE(false, true);
  const kvmerger policy{.joins = kvmerger::mode::threshold,
                        .recent = 0,
                        .heavy = 0,
                        .sinks = 0,
                        .scale_values = scaled};
  auto state = fixtures::make_state(policy, kv);
  fixtures::compress(policy, kv, state, fixtures::queries(11, 1, 2).view(), budget{8});
  const auto head = kv.head(0);
  REQUIRE(head.length() == 5);
  const float values[] = {0, 2, 4, 1, 3}, tokens[] = {1, 4, 1, 4, 1};
  for (index_t s = 0; s < 5; ++s) {
    CHECK(head.value(s)[1] == Approx(values[s] * (scaled ? tokens[s] : 1)));
    CHECK(head.log_mass(s) == Approx(scaled ? 0 : std::log(tokens[s])));
  }
}

TEST_CASE("kvmerger's weights are a Gaussian around the pivot", "[kvmerger]") {
  fixtures::cache<float> kv{{.heads = 1, .dim = 2, .capacity = 3}};
  kv.append(0, std::vector<float>{1, 0, 1, 1, 3, 0}, std::vector<float>{1, 1, 2, 2, 3, 3});
  kvmerger policy{.recent = 0, .heavy = 0, .sinks = 0, .scale_values = true};
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

TEST_CASE("LAW: kvmerger's slots hold all tokens while none is evicted", "[kvmerger][law]") {
  const kvmerger policy{.gaps_break = false};
  auto kv = fixtures::random_cache(60, 8, 2, 70);
  auto state = fixtures::make_state(policy, kv);
  fixtures::compress(policy, kv, state, fixtures::queries(60, 2, 8).view(), budget{40});
  std::vector<float> out(16);
  for (int t = 60; t <= 160; ++t) {
    const auto head = kv.head(0);
    double tokens = 0;
    for (index_t s = 0; s < head.length(); ++s) {
      tokens += std::exp(double{head.log_mass(s)});
    }
    CHECK(tokens == Approx(t).epsilon(1e-4));
    fixtures::step(policy, kv, state,
                   {fixtures::normal(16), fixtures::normal(8), fixtures::normal(8)}, budget{40},
                   out);
  }
}

TEST_CASE("kvmerger counts no token of a broken key, and any log-mass", "[kvmerger]") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  fixtures::cache<float> kv{{.heads = 1, .dim = 1, .capacity = 3}};
  kv.append(0, std::vector<float>{1, 1, 1}, std::vector<float>{1, 1, 1});
  const auto head = kv.head(0);
  const kvmerger policy{.recent = 0, .heavy = 0, .sinks = 0};
  auto state = fixtures::make_state(policy, kv);
  state[0].extend(3);
  kvmeld::slot_scratch scratch;
  kvmeld::merge_plan plan;
  const auto log_mass = [&] {
    policy.plan(head, state[0], 1, scratch, plan);
    REQUIRE(plan.rows() == 1);
    CHECK_NOTHROW(check(plan));
    return plan.log_mass(0);
  };
  CHECK(log_mass() == Approx(std::log(3)));
  for (const float odd : {-300.0F, 300.0F}) {
    head.log_mass(1) = odd;
    CHECK(log_mass() == Approx(std::max(odd, std::log(2.0F))));
  }
  head.log_mass(1) = 0;
  head.key(2)[0] = nan;
  CHECK(log_mass() == Approx(std::log(2)));
}

TEST_CASE("heads that share slots have one epsilon: the oracle's", "[kvmerger][oracle]") {
  const index_t heads = 3, group = 2, dim = 8, tokens = 90;
  const kvmeld::attention_spec spec{.kv_heads = heads, .group = group, .key_dim = dim};
  for (const index_t slots : {12, 30, 60}) {
    kvmeld::cache kv(spec, {.capacity = tokens});
    const auto q = fixtures::normal(tokens * heads * group * dim),
               v = fixtures::normal(tokens * heads * dim);
    auto k = fixtures::normal(tokens * heads * dim);
    std::vector<oracle::head> slow;
    for (index_t h = 0; h < heads; ++h) {  // the keys of later heads are more alike
      slow.push_back(oracle::make_head(dim, group));
      oracle::tensor queries;
      for (index_t t = 0; t < tokens; ++t) {
        const auto row = static_cast<std::size_t>((t * heads + h) * dim);
        k[row] += static_cast<float>(3 * h);
        append(slow.back(), fixtures::to_mat(&k[row], 1, dim)[0],
               fixtures::to_mat(&v[row], 1, dim)[0]);
        queries.push_back(fixtures::to_mat(&q[row * group], group, dim));
      }
      add_column_sums(slow.back(), queries, {}, oracle::combine::sum);
    }
    kvmeld::compressor meld(kv, kvmerger{}, budget::shared(slots));
    kv.append(kv.heads(0, 0), k, v, tokens);
    meld.prompt(kv.heads(0, 0), kvmeld::queries(q, tokens, spec));
    meld.end_prompt(0);
    std::vector<index_t> held;
    for (index_t h = 0; h < heads; ++h) {
      held.push_back(kv.head(h).length());
    }
    CHECK(held == oracle::kvmerger{}.divide(slow, slots));
    CHECK(held[0] > held[2]);
  }
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
      {{.epsilon = 2}, "epsilon in [-1, 1]"},
      {{.recent = 0.5F, .heavy = 0.5F}, "together below 1, got 0.5 and 0.5"},
      {{.sinks = -1}, "sinks in [0, 16777216], got -1"},
      {{.sigma = -1}, "sigma in [0, inf), got -1"},
      {{.period = -1}, "period in [0, 16777216], got -1"},
      {{.share_slots = -1}, "0 to 16777216 shared slots, got -1"}};
  for (const auto& [policy, message] : bad) {
    CHECK_THROWS_WITH(validate(policy), Catch::Contains(message));
  }
  CHECK_THROWS_WITH(kvmerger{}.sharing(6), Catch::Contains("more slots to share than 6 that take"));
}

}  // namespace kvmerger_test
