// SPDX-License-Identifier: MIT
// KeepKV against its oracle, the authors' vectors, and theorem 3.
#include "kvmeld/policies/keepkv.hpp"

#include <catch2/catch.hpp>

#include "oracle/replay.hpp"
#include "support/agree.hpp"
#include "support/golden.hpp"

namespace policies_keepkv_test {

using fixtures::index_t;
using kvmeld::budget;
using kvmeld::keepkv;

std::vector<float> floats(const oracle::mat& m, index_t begin, index_t end) {
  std::vector<float> x;
  for (index_t t = begin; t < end; ++t) {
    for (const double y : m[static_cast<std::size_t>(t)]) {
      x.push_back(static_cast<float>(y));
    }
  }
  return x;
}

/// The stored slots with their votes as log-mass.
oracle::head stored(const oracle::replay& r, const golden::record& g, const std::string& prefix) {
  oracle::head h = r.stored(g, prefix);
  const auto votes = g.of_head((prefix + "votes").c_str(), r.index, r.heads);
  for (std::size_t j = 0; j < votes.size(); ++j) {
    h.slots[j].log_mass = std::log(votes[j]);
  }
  return h;
}

/// Policy and oracle with the same parameters.
std::pair<keepkv, oracle::keepkv> both(keepkv p) {
  oracle::keepkv o{.sinks = p.sinks, .recent = p.recent, .similarity = p.similarity};
  o.variant =
      p.variant == keepkv::mode::paper ? oracle::keepkv::mode::paper : oracle::keepkv::mode::code;
  o.window = p.window;
  o.decay = p.decay;
  o.merge_first = p.merge_first;
  o.epsilon = p.epsilon;
  o.distance_weight = p.distance_weight;
  return {p, o};
}

/// Votes and estimates are the oracle's too, slot by slot in order of position.
const auto same_estimates = [](const kvmeld::head_state& state, const oracle::head& expected,
                               const auto&) {
  std::vector<double> ours, theirs;
  for (std::size_t s = 0; s < expected.slots.size(); ++s) {
    ours.push_back(double{state.column(keepkv::log_score)[s]});
    theirs.push_back(expected.slots[s].log_score);
  }
  std::ranges::sort(ours), std::ranges::sort(theirs);
  REQUIRE(oracle::difference(ours, theirs) < 1e-3);
};

TEST_CASE("keepkv is its oracle", "[oracle]") {
  const keepkv table[] = {{},
                          {.similarity = 0.3F, .window = 8},
                          {.sinks = 0, .recent = 0.25F, .similarity = -1, .decay = 0},
                          {.similarity = 0.2F, .merge_first = false}};
  for (const keepkv& p : table) {
    INFO("similarity " << p.similarity << ", decay " << p.decay);
    const auto [policy, o] = both(p);
    for (const auto& s : fixtures::settings) {
      fixtures::agree(policy, o, s, 1e-3, same_estimates);
    }
  }
  const auto [policy, o] = both({.similarity = 0.4F});
  fixtures::agree<Eigen::half>(policy, o, {100, 16, 2, 40, 20, 0, 2e-3}, 1e-2);
  fixtures::agree<Eigen::bfloat16>(policy, o, {100, 16, 2, 40, 20, 0, 1e-2}, 5e-2);
}

TEST_CASE("keepkv in code mode is its oracle", "[oracle]") {
  for (const float latest : {1.0F, 1.2F, 5.0F}) {
    const auto [policy, o] = both({.similarity = 0.3F,
                                   .variant = keepkv::mode::code,
                                   .window = 8,
                                   .distance_weight = latest});
    for (const auto& s : fixtures::settings) {
      fixtures::agree(policy, o, s, 1e-3);
    }
  }
}

TEST_CASE("keepkv in code mode is the authors' code", "[golden]") {
  const auto g = golden::load("keepkv_code");
  const index_t target = g.number("heavy_with_sinks") + g.number("recent"), prompt = g.prompt();
  const keepkv policy{.sinks = g.number("sinks"),
                      .recent = static_cast<float>(g.number("recent")) / static_cast<float>(target),
                      .similarity = static_cast<float>(g.real("threshold")),
                      .variant = keepkv::mode::code,
                      .window = g.number("recent"),
                      .epsilon = static_cast<float>(g.real("epsilon"))};
  for (int h = 0; h < g.heads(); ++h) {
    const oracle::replay r(g, h);
    fixtures::cache<float> kv{{.heads = 1, .dim = g.dim(), .capacity = 64}};
    auto state = fixtures::make_state(policy, kv);
    kv.append(0, floats(r.k, 0, prompt), floats(r.v, 0, prompt));
    const auto q = floats(r.q, 0, prompt);
    fixtures::compress(policy, kv, state, kvmeld::prompt_queries(q.data(), prompt, 1, 1, g.dim()),
                       budget{target});
    oracle::same_slots(fixtures::to_oracle(kv.head(0)), stored(r, g, "prompt_"), true, false);
    int caches = 0;
    for (int i = 0; i < g.steps(); ++i) {
      INFO("head " << h << ", step " << i);
      const index_t t = prompt + i;
      std::vector<float> out(static_cast<std::size_t>(g.dim()));
      fixtures::step(policy, kv, state,
                     {floats(r.q, t, t + 1), floats(r.k, t, t + 1), floats(r.v, t, t + 1)},
                     budget{target}, out);
      const auto expected = g.step(i);
      CHECK(oracle::difference({out.begin(), out.end()}, expected.of_head("output", h, g.heads())) <
            oracle::tolerance);
      if (expected.has("keys")) {
        ++caches;
        oracle::same_slots(fixtures::to_oracle(kv.head(0)), stored(r, expected, ""), true, false);
      }
    }
    CHECK(caches >= 2);
  }
}

TEST_CASE("keepkv, theorem 3: merging changes nothing for the present query", "[theorem]") {
  // Everything is similar enough, the estimate is the present query's: every removed slot is
  // merged. The outputs are the oracle's, in double. Logits near 1000 are known to a unit in their
  // last place, 6e-5, and no merge can be exacter than its logits.
  const keepkv policy{.sinks = 0, .recent = 0, .similarity = -1, .decay = 0};
  const index_t dim = 8;
  int scaled = 0, unscaled = 0, large = 0;
  double worst = 0;
  for (int trial = 0; trial < 10000; ++trial) {
    const float wanted = std::pow(10.0F, static_cast<float>(trial % 9) / 2.0F - 1.0F);
    const index_t slots = 4 + trial % 4, target = 1 + trial % 3;
    const auto q = fixtures::normal(dim);
    oracle::mat keys;
    double largest = 0;
    for (index_t s = 0; s < slots; ++s) {
      auto key = fixtures::normal(dim);
      for (index_t i = 0; trial % 2 == 1 && i < dim; ++i) {
        key[static_cast<std::size_t>(i)] += 2 * q[static_cast<std::size_t>(i)];  // logits above 0
      }
      keys.push_back({key.begin(), key.end()});
      const oracle::vec query(q.begin(), q.end());
      largest = std::max(largest, std::abs(oracle::dot(keys.back(), query)));
    }
    for (auto& key : keys) {
      for (double& x : key) {
        x *= static_cast<double>(wanted) / largest;
      }
    }
    fixtures::cache<float> kv{{.heads = 1, .dim = dim, .capacity = slots, .scale = 1}};
    kv.append(0, floats(keys, 0, slots - 1), fixtures::normal((slots - 1) * dim));
    const auto head = kv.head(0);
    for (index_t s = 0; s + 1 < slots; ++s) {
      head.log_mass(s) = std::log(static_cast<float>(1 + (trial + s) % 5));
    }
    auto state = fixtures::make_state(policy, kv);
    state[0].extend(slots - 1);
    auto full = fixtures::to_oracle(head);
    const auto value = fixtures::normal(dim);
    const auto key = floats(keys, slots - 1, slots);
    oracle::append(full, {key.begin(), key.end()}, {value.begin(), value.end()});
    std::vector<float> out(static_cast<std::size_t>(dim));
    fixtures::step(policy, kv, state, {q, key, value}, budget{target, slots}, out);
    REQUIRE(head.length() == target);

    const oracle::mat query = {{q.begin(), q.end()}};
    const auto before = attend(full, query), after = attend(fixtures::to_oracle(kv.head(0)), query);
    const double allowed = 1e-5 + 4e-7 * static_cast<double>(wanted);
    INFO("trial " << trial << ", logits up to " << wanted);
    REQUIRE(oracle::difference(before.output, after.output) < allowed);
    REQUIRE(std::abs(before.lse[0] - after.lse[0]) < allowed);
    worst = wanted < 40 ? std::max(worst, oracle::difference(before.output, after.output)) : worst;
    large += wanted > 900 ? 1 : 0;
    for (index_t s = 0; s < target; ++s) {
      const double votes = std::exp(double{head.log_mass(s)});
      ++(std::abs(votes - std::round(votes)) < 1e-4 ? scaled : unscaled);
    }
  }
  INFO("worst below logits of 40: " << worst);
  CHECK(worst < 1e-5);
  CHECK(large > 1000);
  CHECK(scaled > 2000);  // both ways were gone
  CHECK(unscaled > 500);
}

TEST_CASE("keepkv keeps the present output with decay 0 and group 1, else nearly", "[theorem]") {
  // Relative change of the present query's output by a step's merge, over 200 heads of 24 slots.
  const auto changes = [](index_t group, float decay) {
    const keepkv policy{.sinks = 0, .recent = 0, .similarity = -1, .decay = decay};
    const index_t dim = 16, slots = 24;
    std::vector<double> all;
    for (int trial = 0; trial < 200; ++trial) {
      fixtures::cache<float> kv{
          {.heads = 1, .group = group, .dim = dim, .capacity = slots + 1, .scale = 0.25F}};
      kv.append(0, fixtures::normal(slots * dim), fixtures::normal(slots * dim));
      auto state = fixtures::make_state(policy, kv);
      const auto head = kv.head(0);
      fixtures::compress(policy, kv, state, fixtures::queries(slots, group, dim).view(),
                         budget{slots});
      const auto q = fixtures::normal(group * dim), k = fixtures::normal(dim),
                 v = fixtures::normal(dim);
      std::vector<float> before(q.size()), after(q.size());
      fixtures::step(policy, kv, state, {q, k, v}, budget{slots}, before);  // as it was
      REQUIRE(head.length() == slots);
      kvmeld::attend(head, q.data(), after.data());
      double difference = 0, size = 0;
      for (std::size_t i = 0; i < before.size(); ++i) {
        difference += std::pow(double{after[i]} - double{before[i]}, 2);
        size += std::pow(double{before[i]}, 2);
      }
      all.push_back(std::sqrt(difference / size));
    }
    std::ranges::sort(all);
    return std::pair(all[all.size() / 2], all.back());
  };
  CHECK(changes(1, 0).second < 1e-5);
  const std::pair<index_t, float> moved[] = {{4, 0.0F}, {1, 0.9F}, {4, 0.9F}};
  for (const auto& [group, decay] : moved) {
    const auto [median, worst] = changes(group, decay);
    INFO("group " << group << ", decay " << decay << ": " << median << ", at most " << worst);
    CHECK(median > 1e-4);  // it is not kept
    CHECK(median < 8e-2);
    CHECK(worst < 1);
  }
}

TEST_CASE("keepkv's votes count tokens in code mode when all merge", "[keepkv]") {
  const keepkv policy{.sinks = 2, .similarity = -1, .variant = keepkv::mode::code, .window = 8};
  auto kv = fixtures::random_cache(40, 4, 2, 41);
  auto state = fixtures::make_state(policy, kv);
  fixtures::compress(policy, kv, state, fixtures::queries(40, 2, 4).view(), budget{16});
  std::vector<float> out(8);
  for (int t = 0; t < 30; ++t) {
    fixtures::step(policy, kv, state,
                   {fixtures::normal(8), fixtures::normal(4), fixtures::normal(4)}, budget{16},
                   out);
  }
  double votes = 0;
  for (index_t s = 0; s < 16; ++s) {
    votes += std::exp(double{kv.head(0).log_mass(s)});
  }
  CHECK(votes == Approx(70));
}

TEST_CASE("keepkv refuses parameters out of range, and a step without its query", "[errors]") {
  const std::pair<keepkv, const char*> bad[] = {
      {{.sinks = -1}, "sinks in [0, 16777216], got -1"},
      {{.recent = 1}, "expected recent in [0, 1), got 1"},
      {{.similarity = 1.5F}, "similarity in [-1, 1]"},
      {{.window = 0}, "window in [1, 16777216], got 0"},
      {{.decay = 1}, "decay in [0, 1)"},
      {{.epsilon = 0}, "epsilon in (0, inf), got 0"},
      {{.variant = keepkv::mode::code, .distance_weight = 0}, "distance_weight in (0, inf), got 0"},
      {{.distance_weight = 1.2F}, "expected variant=1 (code) with a distance_weight"}};
  for (const auto& [policy, message] : bad) {
    CHECK_THROWS_WITH(validate(policy), Catch::Contains(message));
  }
  auto kv = fixtures::random_cache(3, 2, 1);
  auto state = fixtures::make_state(keepkv{}, kv);
  const std::vector<float> p(3, 1.0F / 3);
  CHECK_THROWS_WITH(
      kvmeld::observe(keepkv{}, kv.head(0), state[0], state.workspace(), {.probabilities = p}),
      Catch::Contains("keepkv: expected the step's query and log-sum-exp"));
}

}  // namespace policies_keepkv_test
