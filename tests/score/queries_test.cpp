// SPDX-License-Identifier: MIT
// Reference queries: where a view finds them, and where they go: within the horizon, in order, as
// densely as the fade says.
#include <algorithm>  // std::min
#include <catch2/catch.hpp>
#include <limits>
#include <numeric>  // std::iota
#include <vector>

#include "kvmeld/memory/cache.hpp"
#include "kvmeld/score/prompt_use.hpp"
#include "kvmeld/score/queries.hpp"

using kvmeld::future_positions;
using kvmeld::index_t;

namespace {

index_t within(const future_positions& ahead, index_t n, index_t from, index_t to) {
  index_t count = 0;
  for (index_t i = 0; i < n; ++i) {
    const index_t at = ahead(i, n);
    count += at >= from && at < to ? 1 : 0;
  }
  return count;
}

}  // namespace

TEST_CASE("queries stay within the horizon, in order", "[lookahead]") {
  const index_t n = GENERATE(1, 2, 64, 1000), horizon = GENERATE(1, 2, 64, 1024);
  const float fade = GENERATE(0.01F, 1.0F, 16.0F, 1e6F, std::numeric_limits<float>::infinity());
  const future_positions ahead{horizon, fade};
  CHECK(ahead(0, n) == 0);
  for (index_t i = 0; i < n; ++i) {
    CHECK(ahead(i, n) >= (i > 0 ? ahead(i - 1, n) : 0));
    CHECK(ahead(i, n) < horizon);
  }
}

TEST_CASE("an infinite fade is even, exactly", "[lookahead]") {
  const future_positions even{.horizon = 100, .fade = std::numeric_limits<float>::infinity()};
  for (index_t i = 0; i < 300; ++i) {
    CHECK(even(i, 300) == i / 3);
  }
}

TEST_CASE("the density is half at the fade, and a third at twice as far", "[lookahead]") {
  const future_positions ahead{.horizon = 4096, .fade = 512};
  const index_t n = 1 << 20;
  const auto density = [&](index_t at) {
    return static_cast<double>(within(ahead, n, at - 8, at + 8));
  };
  CHECK(density(512) / density(8) == Approx(512.0 / 1024).epsilon(0.03));
  CHECK(density(1024) / density(8) == Approx(512.0 / 1536).epsilon(0.03));
}

TEST_CASE("a horizon of nothing and a fade of nothing are refused", "[lookahead]") {
  CHECK_THROWS_WITH((future_positions{.horizon = 0}.validate("fold")), Catch::Contains("horizon"));
  CHECK_THROWS_WITH((future_positions{.fade = 0}.validate("fold")), Catch::Contains("fade"));
  CHECK_THROWS_WITH(
      (future_positions{.fade = std::numeric_limits<float>::quiet_NaN()}.validate("fold")),
      Catch::Contains("nan"));
}

TEST_CASE("query views find every query, and know the positions of the last", "[queries]") {
  const index_t count = 5, heads = 3, group = 2, dim = 4;
  std::vector<float> data(count * heads * group * dim);
  std::iota(data.begin(), data.end(), 0.0F);
  const auto all = kvmeld::prompt_queries(data.data(), count, heads, group, dim);
  const index_t positions[] = {3, 1, 4, 1, 5};
  for (index_t h = 0; h < heads; ++h) {
    for (const index_t n : {0, 1, 3, 5, 9}) {
      auto last = all.of(h).last(n);
      const index_t kept = std::min(n, count);
      REQUIRE(last.count == kept);
      for (index_t i = 0; i < kept; ++i) {
        const index_t token = count - kept + i;
        for (index_t g = 0; g < group; ++g) {
          CHECK(*last.at(g, i) == static_cast<float>(((token * heads + h) * group + g) * dim));
        }
        CHECK(last.position_of(i, 20) == 20 - kept + i);
      }
      auto placed = all;
      placed.position = positions;
      for (index_t i = 0; i < kept; ++i) {
        CHECK(placed.last(n).of(h).position_of(i, 20) == positions[count - kept + i]);
        CHECK(placed.of(h).last(n).at(1, i) == last.at(1, i));
      }
    }
  }
}
