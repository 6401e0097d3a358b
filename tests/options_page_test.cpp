// SPDX-License-Identifier: MIT
// The tables of options in docs/reference/policies.md are those of the declarations. To write them
// anew: KVMELD_WRITE_DOCS=1 kvmeld_tests "the page of policies*"
#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "kvmeld/peers.hpp"
#include "support/paths.hpp"

namespace options_page_test {

/// The table of a policy's options.
std::string table(const auto& policy) {
  std::string all = "\n\n| option and default | range | meaning |\n|---|---|---|\n";
  each_option(policy, [&](const auto& option, const auto& owner) {
    all += "| `" + std::string(option.name) + "=" +
           kvmeld::detail::number_text(option.member(owner)) + "` | " + option.range() + " | " +
           std::string(option.meaning) + " |\n";
  });
  return all + "\n";
}

TEST_CASE("the page of policies has the options that are declared", "[docs]") {
  const std::string file = paths::docs("reference/policies.md");
  std::ifstream in(file);
  const std::string before{std::istreambuf_iterator<char>(in), {}};
  std::string page = before;
  for (const auto& any : kvmeld::any_policy_or_peer::every()) {
    any.visit([&](const auto& p) {
      if constexpr (requires { p.options; }) {
        CAPTURE(p.name());
        const std::string begin = "<!-- options of " + std::string(p.name()) + " -->";
        const auto at = page.find(begin);
        REQUIRE(at != std::string::npos);
        const auto from = at + begin.size(), to = page.find("<!-- end -->", from);
        REQUIRE(to != std::string::npos);
        CHECK((std::getenv("KVMELD_WRITE_DOCS") != nullptr ||
               page.substr(from, to - from) == table(p)));
        page.replace(from, to - from, table(p));
      }
    });
  }
  if (std::getenv("KVMELD_WRITE_DOCS") != nullptr && page != before) {
    std::ofstream(file) << page;
  }
}

}  // namespace options_page_test
