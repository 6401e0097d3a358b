// SPDX-License-Identifier: MIT
// Which policies are in colour in the picture by bytes, and what is marked in it.
#include "evaluate/bytes_picture.hpp"

#include <catch2/catch.hpp>

namespace bytes_picture_test {

evaluate::row of(const std::string& policy, double kl, double facts, double mib = 2) {
  evaluate::row r{};
  r.policy = policy, r.bytes = {mib * (1 << 20)};
  r.kl = {kl}, r.needle_after = {facts};
  return r;
}

TEST_CASE("the best of every panel come first in the picture by bytes") {
  const std::vector<evaluate::row> rows = {of("full_cache/q8_0", 0.01, 1), of("second", 0.5, 0),
                                           of("facts", 0.4, 0.6), of("divergence", 0.1, 0),
                                           of("last", 0.6, 0)};
  const auto script = evaluate::bytes_picture(rows);
  std::size_t before = 0;
  for (const char* const name : {"divergence", "facts", "second", "last"}) {
    CAPTURE(name);
    const auto at = script.find("'" + std::string(name) + "'", before);
    CHECK(at != std::string::npos);
    before = at == std::string::npos ? before : at;
  }
}

TEST_CASE("policies that most pictures show have the same colour in each") {
  using evaluate::colours_of;
  using order = std::vector<std::size_t>;
  CHECK(colours_of({"fold", "x", "y"}, 3) == order{0, 1, 2});
  CHECK(colours_of({"x", "y", "fold", "z"}, 4) == order{1, 2, 0, 3});
  CHECK(colours_of({"snapkv", "a", "b", "c", "d", "e", "f"}, 7) == order{5, 0, 1, 2, 3, 4, 6});
  CHECK(colours_of({"h2o", "fold", "a"}, 2) == order{3, 0});
}

TEST_CASE(
    "a frontier steps through what none beats with as few bytes, and full caches are marked") {
  evaluate::line_panel p{&evaluate::row::kl, "", {}};
  p.point_of = [](const evaluate::row& r) {
    return r.kl->mean > 0 ? std::optional(evaluate::point{r.bytes->mean / (1 << 20), r.kl->mean})
                          : std::nullopt;
  };
  const auto script = evaluate::frontier(
      {of("a", 0.4, 0, 1), of("full_cache", 0, 1, 16), of("full_cache/q8_0", 0.1, 1, 4),
       of("beaten", 0.5, 0, 2), of("b", 0.2, 0, 3)},
      p);
  for (const char* const part :
       {"from first 1,0.4 to first 3,0.4 ", "from first 3,0.4 to first 3,0.2 ",
        "from first 3,0.2 to first 4,0.2 ", "from first 4,0.2 to first 4,0.1 ",
        "'full cache' noenhanced at first 16,", "'full q8_0' noenhanced at first 4,",
        "at first 4,0.1 point"}) {
    CAPTURE(part);
    CHECK(script.find(part) != std::string::npos);
  }
  CHECK(script.find("first 2,") == std::string::npos);
}

}  // namespace bytes_picture_test
