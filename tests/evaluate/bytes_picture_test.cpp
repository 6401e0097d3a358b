// SPDX-License-Identifier: MIT
// Which policies are in colour in the pictures, and what is marked in the one by bytes.
#include "evaluate/bytes_picture.hpp"

#include <catch2/catch.hpp>

namespace bytes_picture_test {

evaluate::row of(const std::string& policy, double kl, double facts, double mib = 2) {
  evaluate::row r{};
  r.policy = policy, r.bytes = {mib * (1 << 20)};
  r.kl = {kl}, r.needle_after = {facts};
  return r;
}

TEST_CASE("the best by every figure come first in the pictures") {
  const std::vector<evaluate::row> rows = {of("full_cache/q8_0", 0.01, 1), of("second", 0.5, 0),
                                           of("facts", 0.4, 0.6), of("divergence", 0.1, 0),
                                           of("last", 0.6, 0)};
  CHECK(evaluate::by_all_figures(rows) ==
        std::vector<std::string>{"divergence", "facts", "second", "last"});
  const auto script = evaluate::bytes_picture(rows, evaluate::palette(rows));
  for (const char* const name : {"divergence", "facts", "second", "last", "full cache, by storage",
                                 "least loss for its bytes"}) {
    CAPTURE(name);
    CHECK(script.find("'" + std::string(name) + "'") != std::string::npos);
  }
  CHECK(script.find("other") == std::string::npos);
}

TEST_CASE("policies that most pictures show have the same colour in every run") {
  const auto colours = [](const std::vector<std::string>& policies) {
    const evaluate::palette of(policies);
    std::vector<int> numbers;
    for (const std::string& policy : policies) {
      const auto colour = of.colour_of(policy);
      numbers.push_back(colour ? static_cast<int>(*colour) : -1);
    }
    return numbers;
  };
  using numbers = std::vector<int>;
  CHECK(colours({"fold", "x", "y"}) == numbers{0, 1, 2});
  CHECK(colours({"x", "y", "fold", "z"}) == numbers{1, 2, 0, 3});
  CHECK(colours({"snapkv", "a", "b", "c", "d", "e", "f", "h2o"}) ==
        numbers{5, 0, 1, 2, 3, 4, 6, -1});
}

TEST_CASE("a policy has the same line in every picture of a run, and others none of their own") {
  std::vector<evaluate::row> rows;
  for (const char* const name : {"h", "g", "f", "e", "d", "c", "b", "a"}) {
    rows.push_back(of(name, 0.1 * static_cast<double>(rows.size() + 1), 0));
    rows.back().attention_error = {0.1}, rows.back().slots = 90;
  }
  const evaluate::palette colours(rows);
  CHECK(!colours.colour_of("a"));
  std::vector<std::string> policies = {"a", "b", "x", "c"};
  CHECK(colours.to_front(policies) == 2);
  CHECK(policies == std::vector<std::string>{"b", "c", "a", "x"});
  // Of two policies one stays alone in grey, and has no colour that another picture gives another.
  const auto script = evaluate::styles({"b", "a"}, colours, 800, 400);
  const auto all = evaluate::styles({"h", "g", "f", "e", "d", "c", "b", "a"}, colours, 800, 400);
  const auto line = [](const std::string& from, const std::string& begin) {
    const auto at = from.find(begin);
    return at == std::string::npos ? "" : from.substr(at + begin.size(), 40);
  };
  CHECK(line(script, "set style line 1") == line(all, "set style line 7"));
  CHECK(script.find("'1 other'") != std::string::npos);
}

TEST_CASE("full caches are named above the picture by bytes, those of like bytes together") {
  const auto script = evaluate::full_caches(
      {of("full_cache", 0, 1, 16), of("full_cache/half", 0, 1, 8),
       of("full_cache/bfloat16", 0, 1, 8), of("full_cache/q8_0", 0, 1, 4), of("fold", 0, 1, 1)},
      1.05);
  for (const char* const name : {"'float32' noenhanced at first 16,",
                                 "'half, bfloat16' noenhanced "
                                 "at first 8,",
                                 "'q8_0' noenhanced at first 4,"}) {
    CAPTURE(name);
    CHECK(script.find(name) != std::string::npos);
  }
  CHECK(script.find("fold") == std::string::npos);
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
        "at first 4,0.1 point"}) {
    CAPTURE(part);
    CHECK(script.find(part) != std::string::npos);
  }
  CHECK(script.find("first 2,") == std::string::npos);
}

}  // namespace bytes_picture_test
