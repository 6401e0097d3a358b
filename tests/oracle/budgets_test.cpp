// SPDX-License-Identifier: MIT
// The oracle's budgets of layers and heads, by hand.
#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>
#include <vector>

#include "oracle/oracle.hpp"
#include "oracle/random.hpp"

namespace oracle_budgets_test {

using oracle::mat;
using oracle::normal;
using oracle::vec;

using ints = std::vector<int>;

int sum(const ints& x) { return std::accumulate(x.begin(), x.end(), 0); }

TEST_CASE("the oracle's layer budgets by variance", "[oracle]") {
  // Layers' means 0.5 and 0.25: shares 1 and e^0.25 of 100.
  CHECK(oracle::layer_budgets({{0, 1}, {2, 2, 2, 6}}, 900, 100) == ints{44, 56});
  CHECK(oracle::layer_budgets({{0, 1}, {2, 2, 2, 6}}, 51, 100) == ints{49, 51});  // no more than S
  CHECK(oracle::layer_budgets({{7}, {3}, {9}}, 90, 31) == ints{11, 10, 10});
  CHECK(oracle::layer_budgets({{7}, {3}, {9}}, 10, 21, {2}) == ints{6, 5, 10});
  CHECK(oracle::layer_budgets({{7}, {3}}, 10, 20, {0, 1}) == ints{10, 10});
  CHECK_THROWS_AS(oracle::layer_budgets({{7}, {3}}, 10, 21), std::invalid_argument);
  CHECK_THROWS_AS(oracle::layer_budgets({{7}, {3}}, 100, 99, {0}), std::invalid_argument);
}

TEST_CASE("the oracle's proportional budgets are exact and within their bounds", "[oracle]") {
  CHECK(oracle::proportional({1, 1, 2}, 8, 0, 9) == ints{2, 2, 4});
  CHECK(oracle::proportional({1, 1, 2}, 10, 0, 9) == ints{3, 2, 5});  // 2.5 2.5 5
  CHECK(oracle::proportional({1, 1, 8}, 10, 0, 6) == ints{2, 2, 6});
  CHECK(oracle::proportional({1, 3, 16}, 20, 2, 12) == ints{2, 6, 12});
  CHECK(oracle::proportional({1, 3, 16}, 36, 2, 12) == ints{12, 12, 12});
  CHECK(oracle::proportional({1, 3, 16}, 6, 2, 12) == ints{2, 2, 2});
  for (int trial = 0; trial < 200; ++trial) {
    const int n = 1 + trial % 12, least = trial % 5, most = least + 1 + trial % 30;
    vec weights;
    for (int i = 0; i < n; ++i) weights.push_back(std::exp(3 * normal(1)[0]));
    const int asked = n * least + (trial * 7919) % (n * (most - least) + 1);
    const ints b = oracle::proportional(weights, asked, least, most);
    REQUIRE(sum(b) == asked);
    for (std::size_t i = 0; i < b.size(); ++i) {
      CHECK((b[i] >= least && b[i] <= most));
      for (std::size_t j = 0; j < b.size(); ++j)
        if (weights[i] > weights[j]) CHECK(b[i] >= b[j] - 1);
    }
  }
}

TEST_CASE("the oracle's pyramids", "[oracle]") {
  CHECK(oracle::pyramid_kv(3, 100, 60, 2) == ints{30, 20, 10});
  CHECK(oracle::pyramid_kv(3, 100, 60, 20) == ints{39, 20, 1});
  CHECK(oracle::pyramid_kv(3, 25, 60, 2) == ints{25, 23, 12});  // 35 in the ratio 2:1
  CHECK(oracle::pyramid_kv(4, 100, 42, 1) == ints{11, 11, 10, 10});
  CHECK(oracle::pyramid_kv(1, 100, 42) == ints{42});
  CHECK(oracle::pyramid_infer(3, 100, 18, 0.2) == ints{10, 6, 2});  // 1, 0.6, 0.2
  CHECK(oracle::pyramid_infer(5, 200, 300, 0.2) == ints{100, 88, 60, 32, 20});
  CHECK(oracle::pyramid_infer(5, 100, 50, 1) == ints{10, 10, 10, 10, 10});
  CHECK(oracle::pyramid_infer(1, 100, 7) == ints{7});
  for (int total = 8; total < 300; total += 13)
    for (const ints& b : {oracle::pyramid_kv(8, 64, total), oracle::pyramid_infer(8, 64, total)}) {
      CHECK(sum(b) == total);
      CHECK(std::is_sorted(b.rbegin(), b.rend()));
      CHECK((b.back() >= 1 && b.front() <= 64));
    }
}

TEST_CASE("the oracle's head budgets", "[oracle]") {
  const mat scores = {{9, 8, 7, 6, 5}, {1, 2, 3, 4, 0}};
  CHECK(oracle::ada_budgets(scores, 6, 0) == ints{5, 1});
  CHECK(oracle::ada_budgets(scores, 4, 0) == ints{4, 0});
  CHECK(oracle::ada_budgets(scores, 4, 0.5) == ints{3, 1});
  CHECK(oracle::ada_budgets(scores, 4, 1) == ints{2, 2});
  CHECK(oracle::ada_budgets(scores, 10) == ints{5, 5});
  CHECK(oracle::ada_budgets({{1, 1}, {1, 1}}, 3, 0) == ints{2, 1});
  CHECK_THROWS_AS(oracle::ada_budgets(scores, 11), std::invalid_argument);
}

}  // namespace oracle_budgets_test
