// SPDX-License-Identifier: MIT
// The oracle's KeepKV against the authors' vectors, the paper's theorem 3, and cases by hand.
#include <catch2/catch.hpp>

#include "oracle/oracle.hpp"
#include "oracle/random.hpp"
#include "oracle/replay.hpp"
#include "support/golden.hpp"

namespace oracle_keepkv_test {

using oracle::head;
using oracle::keepkv;
using oracle::mat;
using oracle::normal;
using oracle::replay;
using oracle::slot;
using oracle::vec;

/// The stored slots with their votes as log-mass.
head stored(const replay& r, const golden::record& g, const std::string& prefix) {
  head h = r.stored(g, prefix);
  const auto votes = g.of_head((prefix + "votes").c_str(), r.index, r.heads);
  for (std::size_t j = 0; j < votes.size(); ++j) h.slots[j].log_mass = std::log(votes[j]);
  return h;
}

/// sinks 0, recent 0, EMA of the present query only.
const keepkv bare{.sinks = 0, .recent = 0, .decay = 0};

slot made(const vec& key, double log_score, double votes = 1) {
  slot s;
  s.key = s.value = key;
  s.log_score = log_score;
  s.log_mass = std::log(votes);
  return s;
}

/// Five keys in the plane, their estimates of ln s as given.
head five() {
  head h = oracle::make_head(2);
  const mat keys = {{1, 0}, {0, 1}, {0.1, 1}, {1, 0.2}, {-1, 0}};
  const vec log_scores = {0, 1, 2, -1, 0.5};
  for (std::size_t j = 0; j < keys.size(); ++j) {
    append(h, keys[j], keys[j]);
    h.slots[j].log_score = log_scores[j];
  }
  return h;
}

TEST_CASE("the oracle's KeepKV in code mode is the authors' code", "[oracle][golden]") {
  const auto g = golden::load("keepkv_code");
  const int target = g.number("heavy_with_sinks") + g.number("recent");
  const keepkv policy{.sinks = g.number("sinks"),
                      .recent = static_cast<double>(g.number("recent")) / target,
                      .similarity = g.real("threshold"),
                      .variant = keepkv::mode::code,
                      .window = g.number("recent"),
                      .epsilon = g.real("epsilon")};
  for (int h = 0; h < g.heads(); ++h) {
    replay r(g, h);
    r.prompt(policy, target);
    oracle::same_slots(r.cache, stored(r, g, "prompt_"), true, false);
    int caches = 0;
    for (int i = 0; i < g.steps(); ++i) {
      INFO("head " << h << ", step " << i);
      const auto expected = g.step(i);
      const vec output = r.step(policy, i, target);
      CHECK(oracle::difference(output, expected.of_head("output", h, g.heads())) <
            oracle::tolerance);
      if (expected.has("keys")) {
        oracle::same_slots(r.cache, stored(r, expected, ""), true, false);
        ++caches;
      }
    }
    CHECK(caches >= 2);
  }
}

TEST_CASE("a merge of the oracle's KeepKV changes nothing for its query (theorem 3)", "[oracle]") {
  int scaled = 0, unscaled = 0;
  for (int trial = 0; trial < 1000; ++trial) {
    const double size = std::pow(10.0, trial % 9 / 2.0 - 1);  // 0.1 ... 1000
    const int members = 2 + trial % 4;
    head h = oracle::make_head(8, 1, 1);
    vec q = normal(8);
    for (int j = 0; j < members + 3; ++j) {
      vec key = normal(8);
      if (trial % 2) key[0] += 3;  // most logits of one sign
      for (double& x : key) x *= size;
      append(h, key, normal(8));
      h.slots.back().log_mass = std::log(1.0 + (trial + j) % 5);
    }
    double largest = 1;
    for (const double l : oracle::logits_of(h, q, 0)) largest = std::max(largest, std::abs(l));
    if (largest > 1e3)
      for (slot& s : h.slots)
        for (double& x : s.key) x *= 1e3 / largest;
    bare.observe(h, {q}, 100);
    const auto before = attend(h, {q});
    std::vector<std::size_t> into;
    for (std::size_t j = 0; j < h.slots.size(); ++j)
      into.push_back(j < static_cast<std::size_t>(members) ? 1 : j);
    double votes = 0;
    for (int j = 0; j < members; ++j)
      votes += std::exp(h.slots[static_cast<std::size_t>(j)].log_mass);
    bare.apply(h, into);
    const auto after = attend(h, {q});
    INFO("trial " << trial << ", logits up to " << largest);
    REQUIRE(h.slots.size() == 4);
    CHECK(oracle::difference(before.output, after.output) < 1e-10);
    CHECK(oracle::difference(before.lse, after.lse) < 1e-12);
    // The estimate that later merges will use is the merged key's own.
    const double own = oracle::dot(q, h.slots[0].key);
    CHECK(oracle::difference(h.slots[0].log_score, own) < 1e-11);
    const bool is_scaled = oracle::difference(h.slots[0].log_mass, std::log(votes)) < 1e-12;
    ++(is_scaled ? scaled : unscaled);
  }
  CHECK(scaled > 200);  // both ways were tried
  CHECK(unscaled > 50);
}

TEST_CASE("the oracle's KeepKV merges by hand", "[oracle]") {
  const double e = std::exp(1.0);
  const slot near = bare.merged({made({2}, 2), made({1}, 1)});
  CHECK(near.key[0] == Approx(std::log((e + e * e) / 2)));
  CHECK(near.value[0] == Approx((e + 2 * e * e) / (e + e * e)));
  CHECK(near.log_mass == Approx(std::log(2.0)));
  CHECK(near.log_score == Approx(near.key[0]));
  const slot votes = bare.merged({made({2}, 2, 3), made({1}, 1, 2)});
  CHECK(votes.key[0] == Approx(std::log((2 * e + 3 * e * e) / 5)));
  CHECK(votes.log_mass == Approx(std::log(5.0)));
  // ln of the mean s is 0.008, the mean of ln s 0.226: the factor is 0.037, so it goes into beta.
  const double w = std::exp(-1.0), x = std::exp(0.5), mean = (-w + 0.5 * x) / (w + x);
  const slot far = bare.merged({made({0.5}, 0.5), made({-1}, -1)});
  CHECK(far.key[0] == Approx(mean));
  CHECK(far.value[0] == Approx(mean));
  CHECK(far.log_mass == Approx(std::log(w + x) - mean));
  CHECK(far.log_score == Approx(mean));
  const slot zero = bare.merged({made({0}, 0), made({0}, 0)});  // 0/0: as if unscaled
  CHECK(zero.key[0] == 0);
  CHECK(zero.log_mass == Approx(std::log(2.0)));
}

TEST_CASE("the oracle's KeepKV estimates are averages with the bias taken out", "[oracle]") {
  head h = oracle::make_head(1, 2, 1);
  append(h, {1}, {1});
  append(h, {2}, {1});
  append(h, {3}, {1});
  const oracle::tensor queries = {{{0.1}, {-1}}, {{0.3}, {2}}, {{-0.5}, {0.2}}};
  auto s = [&](std::size_t query, double key) {
    return (std::exp(queries[query][0][0] * key) + std::exp(queries[query][1][0] * key)) / 2;
  };
  keepkv policy{.sinks = 0, .recent = 0, .decay = 0.5};
  policy.prompt(h, queries, {}, 3);
  CHECK(std::exp(h.slots[0].log_score) ==
        Approx((s(2, 1) + 0.5 * s(1, 1) + 0.25 * s(0, 1)) / 1.75));
  CHECK(std::exp(h.slots[1].log_score) == Approx((s(2, 2) + 0.5 * s(1, 2)) / 1.5));
  CHECK(std::exp(h.slots[2].log_score) == Approx(s(2, 3)));
  CHECK(h.slots[0].seen == 1.75);
  SECTION("over the last queries of a prompt, then over all") {
    head again = h;
    for (slot& x : again.slots) x.log_score = x.seen = 0;
    policy.window = 2;
    policy.prompt(again, queries, {}, 3);
    CHECK(std::exp(again.slots[0].log_score) == Approx((s(2, 1) + 0.5 * s(1, 1)) / 1.5));
    policy.step(again, queries[0], {1}, {1}, 4);
    CHECK(std::exp(again.slots[0].log_score) ==
          Approx((s(0, 1) + 0.5 * s(2, 1) + 0.25 * s(1, 1)) / 1.75));
    CHECK(std::exp(again.slots[3].log_score) == Approx(s(0, 1)));
    CHECK(again.slots[3].seen == 1);
  }
}

TEST_CASE("the oracle's KeepKV merges a prompt first, then evicts", "[oracle]") {
  SECTION("two slots: 1 joins 2, 3 joins 0, and of three leaders 0 has the least") {
    head h = five();
    bare.prompt(h, {}, {}, 2);
    CHECK(oracle::positions(h) == std::vector<int>{2, 4});
    CHECK(h.slots[0].log_mass + h.slots[0].log_score ==
          Approx(std::log(std::exp(1.0) + std::exp(2.0))));
    CHECK(h.slots[1].log_mass == 0);
  }
  SECTION("the ranks count votes: 0 with 3 in it has more than 4") {
    head h = five();
    h.slots[4].log_score = 0.2;  // 0 alone has 0, and ln(1 + 1/e) = 0.31 with 3
    bare.prompt(h, {}, {}, 2);
    CHECK(oracle::positions(h) == std::vector<int>{0, 2});
  }
  SECTION("four slots: only the most similar pair") {
    head h = five();
    bare.prompt(h, {}, {}, 4);
    CHECK(oracle::positions(h) == std::vector<int>{0, 2, 3, 4});
    CHECK(h.slots[2].key == vec{1, 0.2});
  }
  SECTION("evict first: what is not selected finds no selected key that is near") {
    head h = five();
    keepkv late = bare;
    late.merge_first = false;
    late.prompt(h, {}, {}, 2);
    CHECK(oracle::positions(h) == std::vector<int>{1, 2});
    CHECK(h.slots[0].log_mass == 0);
    CHECK(h.slots[1].log_mass == 0);
    head three = five();
    late.prompt(three, {}, {}, 4);  // 3 is merged into 0
    CHECK(oracle::positions(three) == std::vector<int>{0, 1, 2, 4});
    CHECK(three.slots[0].log_mass + three.slots[0].log_score ==
          Approx(std::log(1 + std::exp(-1.0))));
  }
}

TEST_CASE("the oracle's KeepKV in code mode: late queries may count more", "[oracle]") {
  keepkv policy{.sinks = 0, .recent = 0, .similarity = 2, .variant = keepkv::mode::code};
  policy.window = 3;
  head h = oracle::make_head(2, 1, 1);
  for (const vec& k : mat{{1, 0}, {0, 1}, {-1, -1}}) append(h, k, k);
  // Slot 0 has 3 at first, slot 1 as much at last: of sums of s, e^3 + 2 and 2 + e^3.
  const oracle::tensor queries = {{{9, 0}}, {{3, 0}}, {{0, 0}}, {{0, 3}}};
  policy.distance_weight = 1.2;
  policy.prompt(h, queries, {2, 2, 2, 2}, 3);
  const double late = std::exp(3.0);
  CHECK(policy.ranks(h)[0] == Approx(std::log(late + 1.1 + 1.2)));
  CHECK(policy.ranks(h)[1] == Approx(std::log(1 + 1.1 + 1.2 * late)));
  policy.step(h, {{0, 0}}, {-2, -2}, {0, 0}, 4);  // the new slot has one query, the last of three
  CHECK(policy.ranks(h)[0] == Approx(std::log(1 + 1.1 + 1.2)));
  CHECK(policy.ranks(h)[3] == Approx(std::log(1.2)));
  SECTION("two queries, one query") {
    head two = h;
    policy.prompt(two, {{{0, 0}}, {{0, 0}}}, {3, 3}, 4);
    CHECK(policy.ranks(two)[0] == Approx(std::log(1 + 1.2)));
    policy.prompt(two, {{{0, 0}}}, {3}, 4);
    CHECK(policy.ranks(two)[0] == Approx(0).margin(1e-12));
  }
}

TEST_CASE("the oracle's KeepKV holds its budget and its mass", "[oracle]") {
  for (const auto mode : {keepkv::mode::paper, keepkv::mode::code}) {
    const keepkv policy{.sinks = 2, .similarity = -1, .variant = mode, .window = 8};
    head h = oracle::make_head(4, 2);
    oracle::tensor queries;
    for (int t = 0; t < 40; ++t) {
      append(h, normal(4), {1, 1, 1, 1});
      queries.push_back(normal(2, 4));
    }
    policy.prompt(h, queries, {}, 16);
    for (int t = 0; t < 30; ++t) {
      REQUIRE(h.slots.size() == 16);
      const auto output = policy.step(h, normal(2, 4), normal(4), {1, 1, 1, 1}, 16);
      CHECK(oracle::difference(output, mat(2, vec(4, 1.0))) < 1e-12);  // averages of ones
    }
    const auto at = oracle::positions(h);
    CHECK(std::vector<int>(at.begin(), at.begin() + 2) == std::vector<int>{0, 1});
    CHECK(std::vector<int>(at.end() - 8, at.end()) ==
          std::vector<int>{62, 63, 64, 65, 66, 67, 68, 69});
    if (mode == keepkv::mode::code) {
      double votes = 0;
      for (const slot& s : h.slots) votes += std::exp(s.log_mass);
      CHECK(votes == Approx(70));  // everything merges below a similarity of -1
    }
  }
}

}  // namespace oracle_keepkv_test
