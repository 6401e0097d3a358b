// SPDX-License-Identifier: MIT
// Every row of the tables of bad input in docs/reference/errors.md names a test that exists.
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include "support/paths.hpp"

namespace reliability_test {

TEST_CASE("every row of the tables of bad input is a test", "[errors]") {
  const auto read = [](const std::filesystem::path& file) {
    std::ifstream in(file);
    REQUIRE(in);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  std::string tests;
  for (const auto& file : std::filesystem::recursive_directory_iterator(paths::source("tests"))) {
    if (file.path().extension() == ".cpp") {
      tests += read(file);
    }
  }
  std::istringstream page(read(paths::docs("reference/errors.md")));
  int rows = 0;
  bool in_table = false;
  for (std::string row; std::getline(page, row);) {  // | input | expected | test |
    if (!row.starts_with('|')) {
      in_table = false;
    } else if (row.starts_with("| input |")) {
      in_table = true;
    } else if (in_table && !row.starts_with("|---")) {
      const std::size_t last = row.rfind('|'), before = row.rfind('|', last - 1);
      const std::string name = row.substr(before + 2, last - before - 3);
      INFO(name);
      const bool there = tests.find("TEST_CASE(\"" + name + "\"") != std::string::npos;
      CHECK(there);
      ++rows;
    }
  }
  CHECK(rows >= 40);
}

}  // namespace reliability_test
