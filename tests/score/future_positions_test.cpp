// SPDX-License-Identifier: MIT
// Where queries go: within the horizon, in order, as densely as the fade says.
#include <catch2/catch.hpp>
#include <limits>

#include "kvmeld/score/prompt_use.hpp"

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
