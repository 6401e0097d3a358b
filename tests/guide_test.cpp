// SPDX-License-Identifier: MIT
// The code that the guides for engines show is code that is tested.
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
  std::vector<std::vector<std::string>> tested;
  for (const char* file : {"adopting", "serving", "threads", "processes"}) {
    tested.push_back(lines(paths::source("tests/" + std::string(file) + "_test.cpp")));
  }
  const auto is_in = [](const auto& all, auto begin, auto end) {
    return std::search(all.begin(), all.end(), begin, end) != all.end();
  };
  int blocks = 0;
  for (const char* page : {"engine-integration", "tensor-parallelism"}) {
    const auto guide = lines(paths::docs("how-to/" + std::string(page) + ".md"));
    for (auto line = guide.begin(); line != guide.end(); ++line) {
      if (*line != "```cpp") {
        continue;
      }
      const auto begin = ++line;
      line = std::find(begin, guide.end(), "```");
      const bool shown =
          std::ranges::any_of(tested, [&](const auto& all) { return is_in(all, begin, line); });
      INFO("the block that begins with: " << *begin);
      CHECK(shown);
      CHECK(line - begin <= 30);
      ++blocks;
    }
  }
  CHECK(blocks >= 11);
}

}  // namespace guide_test
