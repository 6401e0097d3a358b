// Every row of docs/reliability.md's table of bad input names a test that is there.
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "support/paths.hpp"

TEST_CASE("every row of the table of bad input is a test", "[errors]") {
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
  const std::string page = read(paths::docs("reliability.md"));
  int rows = 0;
  std::size_t end = page.find("| input |");
  for (end = page.find("|---|\n", end) + 5; page[end + 1] == '|'; ++rows) {
    const std::size_t begin = end + 1;
    end = page.find('\n', begin);
    const std::string row = page.substr(begin, end - begin);  // | input | message | what | test |
    const std::size_t last = row.rfind('|'), before = row.rfind('|', last - 1);
    const std::string name = row.substr(before + 2, last - before - 3);
    INFO(name);
    const bool there = tests.find("TEST_CASE(\"" + name + "\"") != std::string::npos;
    CHECK(there);
  }
  CHECK(rows >= 40);
}
