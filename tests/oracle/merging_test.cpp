// SPDX-License-Identifier: MIT
// The oracles of D2O, KVMerger and the budgets, by hand and by what must always hold.
#include <catch2/catch.hpp>

#include "oracle/oracle.hpp"
#include "oracle/random.hpp"

namespace merging_test {

using oracle::head;
using oracle::kvmerger;
using oracle::mat;
using oracle::normal;
using oracle::slot;
using oracle::vec;

/// Slots at 0, 1, ... whose value is their key, with scores as given.
head given(const mat& keys, const vec& scores) {
  head h = oracle::make_head(static_cast<int>(keys[0].size()));
  for (std::size_t j = 0; j < keys.size(); ++j) {
    append(h, keys[j], keys[j]);
    h.slots[j].score = scores[j];
  }
  return h;
}

head random_head(int n, int dim) {
  head h = oracle::make_head(dim);
  for (int j = 0; j < n; ++j) {
    append(h, normal(dim), normal(dim));
    h.slots.back().score = std::abs(normal(1)[0]);
  }
  return h;
}

double total(const head& h, std::size_t x) {
  double sum = 0;
  for (const slot& s : h.slots) sum += s.value[x];
  return sum;
}

using ints = std::vector<int>;

TEST_CASE("the oracle's D2O by hand", "[oracle]") {
  const oracle::d2o policy{.sinks = 1, .recent = 0.5};
  const double e = std::exp(1.0), u = std::exp(0.8);
  head h = given({{1, 0}, {0, 1}, {3, 4}, {-1, 0}, {0, -2}}, {0, 5, 1, 0, 0});
  policy.prompt(h, {}, {}, 3);
  REQUIRE(oracle::positions(h) == ints{0, 1, 4});
  // 2 is 0.8 near 1; 3 is 0 near 1 and 4: the threshold is 0.4.
  CHECK(h.threshold == Approx(0.4));
  CHECK(h.slots[1].key[0] == Approx(3 * u / (e + u)));
  CHECK(h.slots[1].key[1] == Approx((e + 4 * u) / (e + u)));
  CHECK(h.slots[1].value == h.slots[1].key);
  CHECK(h.slots[1].score == 5);
  CHECK(h.slots[1].log_mass == 0);
  CHECK(h.slots[0].key == vec{1, 0});
  CHECK(h.slots[2].key == vec{0, -2});
  // 4 goes into the new one, which has the same direction: 0.7 * 1 + 0.3 * 0.4.
  policy.step(h, {{0, 0}}, {0, -1}, {0, -1}, 3);
  REQUIRE(oracle::positions(h) == ints{0, 1, 5});
  CHECK(h.threshold == Approx(0.82));
  CHECK(oracle::difference(h.slots[2].key, vec{0, -1.5}) < 1e-15);
  CHECK(h.slots[2].score == Approx(0.25));
  // 5 is nearest to 0, at 0: below 0.3 * 0.82, so it is evicted.
  policy.step(h, {{0, 0}}, {1, 1}, {1, 1}, 3);
  REQUIRE(oracle::positions(h) == ints{0, 1, 6});
  CHECK(h.threshold == Approx(0.246));
  CHECK(h.slots[0].key == vec{1, 0});
  CHECK(h.slots[2].key == vec{1, 1});
}

TEST_CASE("the oracle's D2O: tokens counted, and the authors' weights", "[oracle]") {
  oracle::d2o policy{.sinks = 1, .recent = 0.5};
  const double e = std::exp(1.0), u = std::exp(0.8);
  const head before = given({{1, 0}, {0, 1}, {3, 4}, {-1, 0}, {0, -2}}, {0, 5, 1, 0, 0});
  head h = before;
  policy.code_weights = true;  // 2 is 0.8 near 1: (k + 0.8 k_2) / 2
  policy.prompt(h, {}, {}, 3);
  CHECK(h.slots[1].key[0] == Approx(3 * 0.8 / 2));
  CHECK(h.slots[1].value[1] == Approx((1 + 4 * 0.8) / 2));
  CHECK(h.slots[1].log_mass == 0);
  h = before;
  h.slots[2].log_mass = std::log(3.0);
  policy.counts = true;
  policy.prompt(h, {}, {}, 3);
  CHECK(h.slots[1].key[0] == Approx(3 * 3 * 0.8 / 4));
  CHECK(h.slots[1].log_mass == Approx(std::log(4.0)));
  h = before;
  h.slots[2].log_mass = std::log(3.0);
  policy.code_weights = false;
  policy.prompt(h, {}, {}, 3);
  CHECK(h.slots[1].key[0] == Approx(3 * 3 * u / (e + 3 * u)));
  CHECK(h.slots[1].log_mass == Approx(std::log(4.0)));
  CHECK(h.slots[2].log_mass == 0);
}

TEST_CASE("the oracle's D2O: several in one, and keys of zeros", "[oracle]") {
  const oracle::d2o policy{.sinks = 1, .recent = 0};
  const double e = std::exp(1.0);
  head h = given({{1}, {3}, {5}}, {0, 0, 0});
  policy.prompt(h, {}, {}, 1);
  CHECK(h.slots.at(0).key[0] == Approx((1 + 3 + 5) * e / (3 * e)));
  head zeros = given({{0}, {0}, {2}, {4}}, {0, 9, 0, 0});
  policy.prompt(zeros, {}, {}, 2);  // similarity 0 with both: the lower slot takes them
  CHECK(zeros.threshold == 0);
  CHECK(zeros.slots.at(0).key[0] == Approx(6 / (e + 2)));
  CHECK(zeros.slots.at(1).key[0] == 0);
}

TEST_CASE("the oracle's D2O holds its budget, its shares and its averages", "[oracle]") {
  const oracle::d2o policy;
  head h = oracle::make_head(6, 2);
  oracle::tensor queries;
  for (int t = 0; t < 50; ++t) {
    append(h, normal(6), vec(6, 2.0));
    queries.push_back(normal(2, 6));
  }
  policy.prompt(h, queries, {}, 20);
  double scores = 0;
  for (const slot& s : h.slots) scores += s.score;
  CHECK(scores < 100);  // 50 queries of 2 heads; what the evicted had is not handed on
  for (int t = 0; t < 30; ++t) {
    REQUIRE(h.slots.size() == 20);
    policy.step(h, normal(2, 6), normal(6), vec(6, 2.0), 20);
  }
  const auto at = oracle::positions(h);
  CHECK(ints(at.begin(), at.begin() + 4) == ints{0, 1, 2, 3});
  CHECK(ints(at.end() - 4, at.end()) == ints{76, 77, 78, 79});  // a quarter of 16
  for (const slot& s : h.slots) CHECK(oracle::difference(s.value, vec(6, 2.0)) < 1e-14);
}

TEST_CASE("the oracle's KVMerger by hand", "[oracle]") {
  const mat keys = {{9, 9}, {1, 0}, {3, 4}, {6, 8}, {4, 3}, {-9, 1}};
  const vec scores = {3, 1, 1, 7, 2, 0};
  kvmerger policy{.sinks = 1, .scale_values = true};
  const head before = given(keys, scores);  // cosines of 1-2, 2-3, 3-4: 0.6, 1, 0.96
  head h = before;
  SECTION("as many as the budget wants, the most similar") {
    policy.prompt(h, {}, {}, 4);
    REQUIRE(oracle::positions(h) == ints{0, 1, 3, 5});
    const double sigma = (5 + std::sqrt(29.0)) / (std::sqrt(2.0) * 3);
    const double a = std::exp(-25 / (2 * sigma * sigma)), b = std::exp(-29 / (2 * sigma * sigma));
    CHECK(h.slots[2].key[0] == Approx((3 * a + 6 + 4 * b) / (1 + a + b)));
    CHECK(h.slots[2].key[1] == Approx((4 * a + 8 + 3 * b) / (1 + a + b)));
    CHECK(h.slots[2].value[0] == Approx(3 * h.slots[2].key[0]));
    CHECK(h.slots[2].score == 10);
    CHECK(h.slots[2].log_mass == 0);
    policy.scale_values = false;
    policy.sigma = 5;
    head other = before;
    policy.prompt(other, {}, {}, 4);
    const double c = std::exp(-0.5), d = std::exp(-29.0 / 50);
    CHECK(other.slots[2].value[0] == Approx((3 * c + 6 + 4 * d) / (1 + c + d)));
    CHECK(other.slots[2].log_mass == Approx(std::log(3)));
  }
  SECTION("one pair") {
    policy.prompt(h, {}, {}, 5);
    CHECK(oracle::positions(h) == ints{0, 1, 3, 4, 5});
  }
  SECTION("a threshold may leave fewer than the budget, never more") {
    policy.joins = kvmerger::mode::threshold;
    policy.epsilon = 0.5;
    policy.prompt(h, {}, {}, 5);
    CHECK(oracle::positions(h) == ints{0, 3, 5});
    h = before;
    policy.epsilon = 0.96;  // above, not at
    policy.prompt(h, {}, {}, 5);
    CHECK(oracle::positions(h) == ints{0, 1, 3, 4, 5});
    h = before;
    policy.prompt(h, {}, {}, 4);
    CHECK(oracle::positions(h) == ints{0, 1, 3, 5});
  }
  SECTION("when all have joined, runs are evicted") {
    policy.prompt(h, {}, {}, 2);
    CHECK(oracle::positions(h) == ints{0, 5});
  }
  SECTION("heavy hitters and gaps break a run") {
    policy.heavy = 0.5;  // 2 of 4: the sink and slot 3
    policy.prompt(h, {}, {}, 4);
    CHECK(oracle::positions(h) ==
          ints{0, 1, 3, 5});  // 1-2 join, 4 is evicted: equal scores, higher slot
    CHECK(h.slots[1].score == 2);
    h = before;
    h.slots[4].score = 2.5;
    policy.prompt(h, {}, {}, 4);
    CHECK(oracle::positions(h) == ints{0, 3, 4, 5});
    h = before;
    h.slots[5].position = 6;
    h.slots[4].position = 5;
    policy.heavy = 0.25;
    policy.prompt(h, {}, {}, 4);  // 1-2-3 join, 4 stands alone
    CHECK(oracle::positions(h) == ints{0, 3, 5, 6});
    policy.gaps_break = false;
    h = before;
    h.slots[5].position = 6;
    h.slots[4].position = 5;
    policy.prompt(h, {}, {}, 4);
    CHECK(oracle::positions(h) == ints{0, 1, 3, 6});
  }
}

TEST_CASE("the oracle's KVMerger keeps counts, scores and values", "[oracle]") {
  kvmerger policy{
      .sigma = 1e9,
      .scale_values = true};  // all weights alike: a set's value is the sum of its members'
  for (int trial = 0; trial < 20; ++trial) {
    head h = random_head(60, 5);
    const head before = h;
    const int target = 24 + trial;
    policy.prompt(h, {}, {}, target);
    REQUIRE(static_cast<int>(h.slots.size()) == target);
    double was = 0, is = 0;
    for (const slot& s : before.slots) was += s.score;
    for (const slot& s : h.slots) is += s.score;
    CHECK(is == Approx(was));
    CHECK(oracle::difference(total(h, 0), total(before, 0)) < 1e-12);
    for (int t = 0; t < 10; ++t) {
      policy.step(h, normal(1, 5), normal(5), normal(5), target);
      REQUIRE(static_cast<int>(h.slots.size()) == target);
    }
  }
}

TEST_CASE("KVMerger counts tokens: a slot of n is as n equal tokens", "[oracle]") {
  const double sigma = GENERATE(0.0, 2.0);
  const kvmerger policy{.sinks = 0, .sigma = sigma};
  head apart = random_head(3, 5), one = apart;
  for (const int times : {1, 2}) {  // the last is there three times
    apart.slots.push_back(apart.slots[2]);
    apart.slots.back().position = 2 + times;
  }
  one.slots[2].log_mass = std::log(3);
  const slot a = policy.merged(apart, {0, 1, 2, 3, 4}, 0), b = policy.merged(one, {0, 1, 2}, 0);
  CHECK(oracle::difference(a.key, b.key) < 1e-12);
  CHECK(oracle::difference(a.value, b.value) < 1e-12);
  CHECK(a.log_mass == Approx(std::log(5)));
  CHECK(b.log_mass == Approx(std::log(5)));
}

TEST_CASE("KVMerger's one epsilon leaves slots where keys are unlike", "[oracle]") {
  head alike = random_head(40, 2), unlike = random_head(40, 16);
  for (std::size_t j = 0; j < 40; ++j) alike.slots[j].key = {1, 0.01 * static_cast<double>(j)};
  const ints left = kvmerger{}.divide({alike, unlike}, 20);
  CHECK(left[0] + left[1] == 40);
  CHECK(left[0] < left[1]);
}

}  // namespace merging_test
