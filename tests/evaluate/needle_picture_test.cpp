// SPDX-License-Identifier: MIT
// Names in the pictures: beside a sample of their line, and apart from their neighbours'.
#include "evaluate/needle_picture.hpp"

#include <catch2/catch.hpp>

namespace needle_picture_test {

evaluate::outcome found(const std::string& policy) {
  evaluate::outcome x;
  x.result.policy = policy, x.result.slots = 90, x.result.needle_after = {1};
  x.needle_after.asked[0] = x.needle_after.right[0] = 1;
  return x;
}

TEST_CASE("a panel's long name of two words takes two rows, a short one and a lone one do not") {
  std::vector<evaluate::outcome> outcomes;
  for (const char* const name :
       {"a", "b", "c", "fold+equal", "streaming_llm+duo_attention", "expected_attention"}) {
    outcomes.push_back(found(name));
  }
  const auto script = evaluate::needle_picture(outcomes);
  CHECK(script.find(R"(set title "fold+equal")") != std::string::npos);
  CHECK(script.find(R"(set title "streaming_llm\n+duo_attention")") != std::string::npos);
  CHECK(script.find(R"(set title "expected_attention")") != std::string::npos);
}

TEST_CASE("full caches that find what the reference finds are named, others have a panel") {
  auto other = found("full_cache/q4_0");
  other.needle_after.right[0] = 0, other.needle_after.right[1] = other.needle_after.asked[1] = 1;
  const auto script = evaluate::needle_picture(
      {found("full_cache"), found("full_cache/q8_0"), found("full_cache/half"), other});
  CHECK(script.find("as full_cache: full_cache/q8_0, full_cache/half") != std::string::npos);
  CHECK(script.find("set title \"full_cache\"") != std::string::npos);
  CHECK(script.find("set title \"full_cache/q4_0\"") != std::string::npos);
  CHECK(script.find("set title \"full_cache/q8_0\"") == std::string::npos);
}

TEST_CASE("every name of a legend has a line of its own style") {
  const auto script = evaluate::legend({{"fold", 1}, {"20 others", 2}}, 0.1, 800, 400);
  CHECK(script.find("set label 101 '20 others'") != std::string::npos);
  const auto arrow = script.find("set arrow 101 ");
  REQUIRE(arrow != std::string::npos);
  CHECK(script.substr(arrow, script.find('\n', arrow) - arrow).ends_with("nohead linestyle 2"));
  CHECK(script.find("set arrow 100 ") != std::string::npos);
}

}  // namespace needle_picture_test
