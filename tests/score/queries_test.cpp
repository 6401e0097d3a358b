// SPDX-License-Identifier: MIT
// Reference queries: where a view finds them, and where they go: within the horizon, in order, as
// densely as the fade says.
#include "kvmeld/score/queries.hpp"

#include <algorithm>  // std::min
#include <catch2/catch.hpp>
#include <limits>
#include <numeric>  // std::iota
#include <vector>

#include "../../examples/evaluate/reference_queries.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/score/observation.hpp"

namespace queries_test {

using kvmeld::future_positions;
using kvmeld::index_t;

index_t within(const future_positions& ahead, index_t n, index_t from, index_t to) {
  index_t count = 0;
  for (index_t i = 0; i < n; ++i) {
    const index_t at = ahead(i, n);
    count += at >= from && at < to ? 1 : 0;
  }
  return count;
}

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

TEST_CASE("queries are chosen for heads of one prompt alone", "[queries][errors]") {
  constexpr index_t dim = 8, tokens = 20;
  kvmeld::cache kv({.kv_heads = 2, .key_dim = dim, .rope = kvmeld::rotary::halves(10'000)},
                   {.capacity = 128});
  const std::vector<float> rows(100 * dim, 0.5F), q(2 * tokens * dim, 1);
  const auto own = kvmeld::prompt_queries(q.data(), tokens, 2, 1, dim);
  kv.append(kvmeld::head_range{0, 1}, rows, rows, 100);
  for (const index_t more : {20, 79}) {  // as of two requests, and of one that lacks a token
    kv.append(kvmeld::head_range{1, 1}, std::vector<float>(static_cast<std::size_t>(more * dim)),
              std::vector<float>(static_cast<std::size_t>(more * dim)), more);
    const auto refused = Catch::Contains("heads of one prompt, which have seen 100 tokens, got ");
    CHECK_THROWS_WITH(evaluate::spread(kv, own, 4), refused);
    CHECK_THROWS_WITH(evaluate::lookahead(kv, own, {.count = 4}), refused);
  }
  kv.append(kvmeld::head_range{1, 1}, std::vector<float>(dim), std::vector<float>(dim), 1);
  auto ahead = evaluate::lookahead(kv, own, {.count = 4});
  for (index_t i = 0; i < ahead.count(); ++i) {
    CHECK(ahead.position(i) >= 100);
  }
}

}  // namespace queries_test
