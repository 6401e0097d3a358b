// SPDX-License-Identifier: MIT
// The code that docs/how-to/engine-integration.md shows is code that is tested.
#include <algorithm>
#include <catch2/catch.hpp>
#include <fstream>
#include <string>
#include <vector>

#include "support/paths.hpp"

namespace guide_test {

TEST_CASE("the guide shows what is tested", "[adopting]") {
  // Lines without the white space around them, and without empty ones.
  const auto lines = [](const std::string& file) {
    std::ifstream in(file);
    REQUIRE(in);
    std::vector<std::string> all;
    for (std::string line; std::getline(in, line);) {
      const auto first = line.find_first_not_of(' ');
      if (first != std::string::npos) {
        all.push_back(line.substr(first));
      }
    }
    return all;
  };
  const auto tested = lines(paths::source("tests/adopting_test.cpp")),
             served = lines(paths::source("tests/serving_test.cpp")),
             threaded = lines(paths::source("tests/threads_test.cpp")),
             guide = lines(paths::docs("how-to/engine-integration.md"));
  const auto is_in = [](const auto& all, auto begin, auto end) {
    return std::search(all.begin(), all.end(), begin, end) != all.end();
  };
  int blocks = 0;
  for (auto line = guide.begin(); line != guide.end(); ++line) {
    if (*line != "```cpp") {
      continue;
    }
    const auto begin = ++line;
    line = std::find(begin, guide.end(), "```");
    const bool shown =
        is_in(tested, begin, line) || is_in(served, begin, line) || is_in(threaded, begin, line);
    INFO("the block that begins with: " << *begin);
    CHECK(shown);
    CHECK(line - begin <= 30);
    ++blocks;
  }
  CHECK(blocks >= 10);
}

}  // namespace guide_test
