// SPDX-License-Identifier: MIT
// The tables of options in docs/reference/policies.md are those of the declarations. To write them
// anew: KVMELD_WRITE_DOCS=1 kvmeld_tests "the page of policies*"
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>

#include "kvmeld/peers.hpp"
#include "support/paths.hpp"

namespace options_page_test {

using kvmeld::any_policy_or_peer;

/// Options that most policies have, which stand in a table of their own.
bool is_common(std::string_view option) { return option == "sinks" || option == "combine"; }

std::string row(const auto& option, const auto& owner) {
  return "| `" + std::string(option.name) + "=" +
         kvmeld::detail::number_text(option.member(owner)) + "` | ";
}

/// Of a number that is no count, answer or mode, which their meanings say.
std::string range(const auto& option, const auto& owner) {
  using member = std::remove_cvref_t<decltype(option.member(owner))>;
  const bool is_said = std::is_floating_point_v<member> ||
                       (option.high.value > 1 && option.high.value < kvmeld::any_count.value &&
                        !std::is_enum_v<member>);
  return is_said ? "; in " + option.range() : "";
}

/// The table of a policy's other options.
std::string table(const auto& policy) {
  std::string all = "\n\n| option and default | meaning |\n|---|---|\n";
  each_option(policy, [&](const auto& option, const auto& owner) {
    if (!is_common(option.name)) {
      all += row(option, owner) + std::string(option.meaning) + range(option, owner) + " |\n";
    }
  });
  return all + "\n";
}

/// The rows of the common options, each with the policies that have it.
std::string common_table() {
  std::map<std::string, std::string> rows;
  for (const auto& any : any_policy_or_peer::every()) {
    any.visit([&](const auto& p) {
      if constexpr (requires { p.options; }) {
        each_option(p, [&](const auto& option, const auto& owner) {
          if (is_common(option.name)) {
            std::string& in = rows[row(option, owner)];
            in += (in.empty() ? "`" : ", `") + std::string(p.name()) + "`";
          }
        });
      }
    });
  }
  std::string all = "\n\n| option and default | policies |\n|---|---|\n";
  for (const auto& [first, policies] : rows) {
    all += first + policies + " |\n";
  }
  return all + "\n";
}

TEST_CASE("the page of policies has the options that are declared", "[docs]") {
  const std::string file = paths::docs("reference/policies.md");
  std::ifstream in(file);
  const std::string before{std::istreambuf_iterator<char>(in), {}};
  std::string page = before;
  const auto expect_table = [&](const std::string& of, const std::string& table) {
    CAPTURE(of);
    const std::string begin = "<!-- options of " + of + " -->";
    const auto at = page.find(begin);
    REQUIRE(at != std::string::npos);
    const auto from = at + begin.size(), to = page.find("<!-- end -->", from);
    REQUIRE(to != std::string::npos);
    CHECK((std::getenv("KVMELD_WRITE_DOCS") != nullptr || page.substr(from, to - from) == table));
    page.replace(from, to - from, table);
  };
  expect_table("many policies", common_table());
  for (const auto& any : any_policy_or_peer::every()) {
    any.visit([&](const auto& p) {
      if constexpr (requires { p.options; }) {
        if (const auto own = table(p); std::ranges::count(own, '\n') > 5) {
          expect_table(std::string(p.name()), own);
        }
      }
    });
  }
  if (std::getenv("KVMELD_WRITE_DOCS") != nullptr && page != before) {
    std::ofstream(file) << page;
  }
}

}  // namespace options_page_test
