// SPDX-License-Identifier: MIT
// Which slot goes first, and where a selection ends.
#include "kvmeld/search/select.hpp"

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "support/fixtures.hpp"

namespace select_test {

using fixtures::index_t;

TEST_CASE("the lowest scored slot is the first by score, the higher slot among equals",
          "[select]") {
  for (int round = 0; round < 200; ++round) {
    auto x = fixtures::normal(331);
    for (float& y : x) {
      y = std::round(y * static_cast<float>(round % 8)) * (round % 3 == 0 ? -0.0F : 0.5F);
    }
    if (round % 5 == 0) {
      x[static_cast<std::size_t>(round)] = std::numeric_limits<float>::quiet_NaN();
    }
    const auto stays = [&](index_t s) { return (s * 7 + round) % 4 == 0; };
    index_t last = -1;
    for (index_t s = 0; s < 331; ++s) {
      const auto at = [&](index_t i) { return kvmeld::rank(x[static_cast<std::size_t>(i)]); };
      last = !stays(s) && (last < 0 || at(s) <= at(last)) ? s : last;
    }
    REQUIRE(kvmeld::search::lowest_scored(331, stays, kvmeld::search::column_score(x)) == last);
    const auto whole = [&](index_t s) { return (s * 37 + round) % 101; };
    last = -1;
    for (index_t s = 0; s < 331; ++s) {
      last = !stays(s) && (last < 0 || whole(s) <= whole(last)) ? s : last;
    }
    REQUIRE(kvmeld::search::lowest_scored(331, stays, whole) == last);
  }
}

std::size_t at(index_t i) { return static_cast<std::size_t>(i); }

TEST_CASE("what is selected is what a sorted list has first, however few are evicted", "[oracle]") {
  kvmeld::slot_scratch work;
  for (int round = 0; round < 120; ++round) {
    const index_t n = 331, target = std::array{330, 329, 299, 200, 90}[at(round % 5)];
    auto x = fixtures::normal(n);
    for (float& y : x) {
      y = round % 4 == 0 ? -static_cast<float>(&y - x.data())
                         : std::round(4 * y);  // falling, equal
    }
    x[at(round)] = std::numeric_limits<float>::quiet_NaN();
    const auto stays = [&](index_t s) { return (s * 7 + round) % 4 == 0; };
    std::vector<index_t> order(at(n));
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](index_t a, index_t b) {
      const auto key = [&](index_t s) { return std::pair(stays(s), kvmeld::rank(x[at(s)])); };
      return key(a) > key(b);
    });
    kvmeld::search::select(n, target, stays, kvmeld::search::column_score(x), work);
    for (index_t i = 0; i < n; ++i) {
      REQUIRE((work.marks[order[at(i)]] != 0) == (i < target));
    }
  }
}

TEST_CASE("the k-th largest is where a sorted list has it", "[oracle]") {
  constexpr float inf = std::numeric_limits<float>::infinity();
  for (const index_t n : {1, 2, 63, 331}) {
    for (const float step : {1e-6F, 0.5F, 4.0F}) {  // the coarser, the more are equal
      std::vector<float> x = fixtures::normal(n);
      for (float& value : x) {
        value = step * std::round(value / step);  // −0 among them
      }
      x[static_cast<std::size_t>(n / 2)] = -inf, x[static_cast<std::size_t>(n / 3)] = inf;
      const auto score = [&](index_t s) { return x[static_cast<std::size_t>(s)]; };
      const auto stays = [&](index_t s) { return n > 2 && (s % 7 == 3 || s == 0); };
      std::vector<index_t> order;
      for (index_t s = 0; s < n; ++s) {
        if (!stays(s)) {
          order.push_back(s);
        }
      }
      std::ranges::stable_sort(order, std::greater<>(), score);
      for (std::size_t k = 1; k <= order.size(); ++k) {
        const auto bar = kvmeld::search::kth_largest(n, static_cast<index_t>(k), stays, score);
        CAPTURE(n, step, k);
        REQUIRE(bar.slot == order[k - 1]);
        REQUIRE(bar.score == score(order[k - 1]));
        for (std::size_t i = 0; i < order.size(); ++i) {
          REQUIRE(bar.below(score(order[i]), order[i]) == (i >= k));
        }
      }
    }
  }
}

}  // namespace select_test
