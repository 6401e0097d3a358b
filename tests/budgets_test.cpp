// SPDX-License-Identifier: MIT
// Budgets of layers: the oracle's, exact sums, monotone in the variance.
#include "oracle/budgets.hpp"

#include <catch2/catch.hpp>
#include <numeric>

#include "kvmeld/compress/budgets.hpp"
#include "support/divided.hpp"

namespace budgets_test {

using fixtures::below;
using fixtures::flat;
using fixtures::index_t;
using fixtures::random_rows;
using fixtures::sum;

TEST_CASE("proportional budgets are the oracle's and sum exactly", "[oracle][budgets]") {
  for (int trial = 0; trial < 3000; ++trial) {
    const index_t n = 1 + below(12), least = below(5), most = least + below(40);
    const index_t total = n * least + below(n * (most - least) + 1);
    oracle::vec weights = random_rows(1, n)[0];
    if (trial % 3 == 0) {
      for (double& w : weights) {
        w = 1 + below(3);  // ties
      }
    }
    INFO("trial " << trial << ": " << n << " shares of " << least << " to " << most << ", total "
                  << total);
    const auto budget = kvmeld::proportional_budgets(weights, total, least, most);
    REQUIRE(sum(budget) == total);
    for (const index_t b : budget) {
      REQUIRE(b >= least);
      REQUIRE(b <= most);
    }
    REQUIRE(budget == oracle::proportional(weights, total, least, most));
  }
}

TEST_CASE("D2O's layer budgets are the oracle's", "[oracle][budgets]") {
  for (int trial = 0; trial < 500; ++trial) {
    const index_t layers = 4 + below(30), heads = 1 + below(8), length = 100 + below(900);
    const std::vector<index_t> exempt =
        trial % 2 == 0 ? std::vector<index_t>{} : std::vector<index_t>{0, 1, layers - 1};
    const auto kept = static_cast<index_t>(exempt.size());
    const index_t least = kept * length + (layers - kept) * ((length + 99) / 100);
    const index_t total = least + below(layers * length - least + 1);
    const auto variances = random_rows(layers, heads);
    const auto budget =
        kvmeld::layer_budgets(flat<double>(variances), layers, length, total, exempt);
    REQUIRE(sum(budget) == total);
    REQUIRE(budget == oracle::layer_budgets(variances, length, total, exempt));
    for (const index_t l : exempt) {
      REQUIRE(budget[static_cast<std::size_t>(l)] == length);
    }
  }
}

TEST_CASE("a layer whose attention varies more gets no more", "[budgets]") {
  for (int trial = 0; trial < 200; ++trial) {
    const index_t layers = 6, heads = 4, length = 500;
    auto variances = random_rows(layers, heads);
    index_t before = length + 1;
    for (int up = 0; up < 6; ++up) {  // one head moves from its layer's least to its most
      variances[2] = {1, 9, 3, 1 + up * 1.6};
      const auto budget = kvmeld::layer_budgets(flat<double>(variances), layers, length, 900);
      CHECK(budget[2] <= before);
      before = budget[2];
    }
    // The order of budgets is that of the normalised variances.
    variances[3] = {1, 1, 1, 2}, variances[4] = {1, 2, 2, 2};
    const auto budget = kvmeld::layer_budgets(flat<double>(variances), layers, length, 900);
    CHECK(budget[3] > budget[4]);
  }
}

TEST_CASE("the authors' exempt layers are the first two and the last", "[budgets]") {
  using list = std::vector<index_t>;
  CHECK(kvmeld::d2o_exempt_layers(30) == list{0, 1, 29});
  CHECK(kvmeld::d2o_exempt_layers(2) == list{0, 1});
  CHECK(kvmeld::d2o_exempt_layers(1) == list{0});
}

TEST_CASE("the variance of column sums is their population variance", "[budgets]") {
  CHECK(kvmeld::variance(std::vector<float>{1, 2, 3, 4}) == Approx(1.25));
  CHECK(kvmeld::variance(std::vector<float>{7, 7}) == 0);
}

TEST_CASE("budgets that cannot be are refused", "[errors][budgets]") {
  using namespace kvmeld;
  const std::vector<double> w = {1, 2, 3};
  CHECK_THROWS_WITH(proportional_budgets(w, 2, 1, 9), Catch::Contains("3 to 27 slots"));
  CHECK_THROWS_WITH(proportional_budgets(w, 28, 1, 9), Catch::Contains("got 28"));
  CHECK_THROWS_WITH(proportional_budgets(std::vector<double>{1, 0}, 4, 1, 9),
                    Catch::Contains("expected finite weights above 0, got 0"));
  CHECK_THROWS_WITH(layer_budgets(w, 2, 10, 10), Catch::Contains("variances [2, heads]"));
  CHECK_THROWS_WITH(layer_budgets(w, 3, 10, 5, std::vector<index_t>{1}),
                    Catch::Contains("expected at least 10 slots (the exempt layers'), got 5"));
  CHECK_THROWS_WITH(layer_budgets(w, 3, 10, 25, std::vector<index_t>{3}),
                    Catch::Contains("expected exempt layers 0 to 2, got 3"));
}

}  // namespace budgets_test
