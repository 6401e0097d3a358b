// SPDX-License-Identifier: MIT
// The C++ that README and the pages show is code that is compiled, and run.
#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "support/paths.hpp"

namespace guide_test {

TEST_CASE("pages show code that is tested") {
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
  for (const char* file :
       {"tests/adopting_test", "tests/serving_test", "tests/threads_test", "tests/processes_test",
        "tests/llama_cpp/guide_test", "examples/quickstart"}) {
    tested.push_back(lines(paths::source(std::string(file) + ".cpp")));
  }
  const auto is_in = [](const auto& all, auto begin, auto end) {
    return std::search(all.begin(), all.end(), begin, end) != all.end();
  };
  std::vector<std::string> pages = {paths::source("README.md")};
  for (const auto& file : std::filesystem::recursive_directory_iterator(paths::source("docs"))) {
    if (file.path().extension() == ".md") {
      pages.push_back(file.path().string());
    }
  }
  int blocks = 0;
  for (const std::string& page : pages) {
    const auto guide = lines(page);
    for (auto line = guide.begin(); line != guide.end(); ++line) {
      if (*line != "```cpp") {
        continue;
      }
      const auto begin = ++line;
      line = std::find(begin, guide.end(), "```");
      const bool shown =
          std::ranges::any_of(tested, [&](const auto& all) { return is_in(all, begin, line); });
      INFO(page << ": the block that begins with: " << *begin);
      CHECK(shown);
      CHECK(line - begin <= 30);
      ++blocks;
    }
  }
  CHECK(blocks >= 15);
}

}  // namespace guide_test
