// SPDX-License-Identifier: MIT
// Published divisions to compare with: the oracle's, exact sums.
#include "evaluate/divisions.hpp"

#include <catch2/catch.hpp>

#include "oracle/budgets.hpp"
#include "support/divided.hpp"

namespace divisions_test {

using fixtures::below;
using fixtures::flat;
using fixtures::index_t;
using fixtures::random_rows;
using fixtures::sum;

TEST_CASE("pyramids are the oracle's", "[oracle][budgets]") {
  for (int trial = 0; trial < 500; ++trial) {
    const index_t layers = 1 + below(80), length = 8 + below(500);
    const index_t total = layers + below(layers * (length - 1) + 1);
    const double steepness = 1 + below(40), least = 0.05 + 0.05 * below(20);
    const auto kv = evaluate::pyramid_kv(layers, length, total, steepness);
    const auto infer = evaluate::pyramid_infer(layers, length, total, least);
    REQUIRE(sum(kv) == total);
    REQUIRE(sum(infer) == total);
    REQUIRE(kv == oracle::pyramid_kv(layers, length, total, steepness));
    REQUIRE(infer == oracle::pyramid_infer(layers, length, total, least));
    REQUIRE(std::ranges::is_sorted(kv, [](index_t a, index_t b) { return a > b + 1; }));
  }
  CHECK(evaluate::pyramid_kv(4, 100, 40, 1) == std::vector<index_t>{10, 10, 10, 10});
}

TEST_CASE("AdaKV's budgets are the oracle's", "[oracle][budgets]") {
  for (int trial = 0; trial < 500; ++trial) {
    const index_t heads = 1 + below(8), slots = 1 + below(60), total = below(heads * slots + 1);
    const double floor = 0.1 * below(11);
    auto scores = random_rows(heads, slots);
    for (auto& row : scores) {
      for (double& s : row) {
        s = trial % 2 == 0 ? std::floor(s) : static_cast<double>(static_cast<float>(s));
        s = below(50) == 0 ? std::nan("") : s;
      }
    }
    const auto budget = evaluate::ada_budgets(flat<float>(scores), heads, total, floor);
    REQUIRE(sum(budget) == total);
    REQUIRE(budget == oracle::ada_budgets(scores, total, floor));
  }
}

TEST_CASE("divisions that cannot be are refused", "[errors][budgets]") {
  CHECK_THROWS_WITH(evaluate::pyramid_kv(4, 10, 20, 0.5), Catch::Contains("a finite steepness"));
  CHECK_THROWS_WITH(evaluate::pyramid_infer(4, 10, 20, 0),
                    Catch::Contains("a least weight in (0, 1]"));
  CHECK_THROWS_WITH(evaluate::ada_budgets(std::vector<float>{1, 2}, 1, 3),
                    Catch::Contains("0 to 2 slots"));
}

}  // namespace divisions_test
