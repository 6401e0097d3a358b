// SPDX-License-Identifier: MIT
// Exceptions, and a code that says what an engine can do about them.
#include <catch2/catch.hpp>
#include <limits>
#include <optional>
#include <sstream>

#include "support/policies.hpp"
#include "support/refusals.hpp"

namespace error_test {

using fixtures::cache;
using fixtures::normal;
using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::budget;
using kvmeld::errc;
using kvmeld::index_t;

std::optional<errc> code_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const kvmeld::error& e) {
    return e.code();
  }
  return {};
}

TEST_CASE("an error's message has text and numbers as streams write them", "[errors]") {
  const std::string text = "text";
  CHECK_NOTHROW(kvmeld::expects(true, 1));
  try {
    kvmeld::expects(false, "text ", std::string_view("view "), text, " ", -1, " ",
                    std::numeric_limits<std::uint64_t>::max(), " ", std::ptrdiff_t{-7}, " ", 0.1F,
                    " ", 1e-9, " ", -INFINITY, " ", 1234567.0);
    FAIL("nothing was thrown");
  } catch (const std::runtime_error& e) {  // what a caller without kvmeld's types catches
    std::ostringstream streamed;
    streamed << "kvmeld: text view text " << -1 << ' ' << std::numeric_limits<std::uint64_t>::max()
             << ' ' << -7 << ' ' << 0.1F << ' ' << 1e-9 << ' ' << -INFINITY << ' ' << 1234567.0;
    CHECK(e.what() == streamed.str());
  }
}

TEST_CASE("an error's code says what an engine can do about it", "[errors]") {
  cache<float> kv{{.heads = 1, .dim = 2, .capacity = 4}};
  const std::vector<float> x = normal(10);
  const std::span<const float> all(x);
  const auto code = [](errc wanted, const std::function<void()>& call) {
    CHECK(code_of(call) == wanted);
  };
  SECTION("a full head") {
    code(errc::no_capacity, [&] { kv.append(0, all, all); });
    CHECK_THROWS_AS(kv.append(0, all, all), kvmeld::no_capacity);
    CHECK_THROWS_AS(kv.append(0, all, all.first(8)), kvmeld::invalid_argument);
    code(errc::invalid_argument, [&] { kv.append(0, all, all.first(8)); });
    kv.append(0, all.first(8), all.first(8));
    code(errc::no_capacity, [&] { kv.head(0).push(x.data(), x.data()); });
    code(errc::no_capacity,
         [&] { check_step(any_policy(kvmeld::streaming_llm{.sinks = 1}), kv.head(0), budget{2}); });
    std::vector<float> rows(20);
    fixtures::strided_view<float> view({.heads = 1, .dim = 2, .capacity = 4}, {rows.data(), 8, 2},
                                       {rows.data() + 8, 8, 2});
    code(errc::no_capacity, [&] { view.commit(0, 5); });
    code(errc::invalid_argument, [&] { view.commit(0, -1); });
  }
  SECTION("the last position") {
    kv.head(0).restore(0, std::numeric_limits<index_t>::max());
    code(errc::no_capacity, [&] { kv.append(0, all.first(2), all.first(2)); });
    code(errc::no_capacity, [&] { kv.head(0).push(x.data(), x.data()); });
    code(errc::no_capacity,
         [&] { check_step(any_policy(kvmeld::full_cache{}), kv.head(0), budget{}); });
  }
  SECTION("a missing page") {
    std::vector<float> rows(8);
    index_t table[] = {0, -1};
    fixtures::paged_view<float> pages({.heads = 1, .dim = 2, .capacity = 4},
                                      {rows.data(), 0, 2, 1, 4}, {rows.data() + 4, 0, 2, 1, 4},
                                      {table, 2});
    code(errc::no_page, [&] { pages.append(0, all.first(6), all.first(6)); });
    code(errc::no_page, [&] { pages.commit(0, 3); });
    pages.append(0, all.first(4), all.first(4));
    code(errc::no_page, [&] { pages.head(0).push(x.data(), x.data()); });
  }
  SECTION("what a policy cannot do") {
    code(errc::unsupported, [&] {
      check_step(any_policy(kvmeld::attention_matching{.sinks = 0}), kv.head(0), budget{2});
    });
    code(errc::invalid_argument, [&] {
      check_step(any_policy(kvmeld::streaming_llm{.sinks = -1}), kv.head(0), budget{2});
    });
  }
  SECTION("a file that was changed, cut, or is another's") {
    const any_policy p(kvmeld::h2o{});
    kv.append(0, all.first(4), all.first(4));
    auto state = fixtures::make_state(p, kv);
    std::stringstream file;
    save(file, p, kv, state);
    const std::string bytes = file.str();
    const auto loads = [&](const std::string& what) {
      std::istringstream in(what);
      load(in, p, kv, state);
    };
    CHECK_NOTHROW(loads(bytes));
    code(errc::corrupt_file, [&] { loads("something else"); });
    code(errc::corrupt_file, [&] { loads(bytes.substr(0, bytes.size() - 1)); });
    code(errc::corrupt_file, [&] { loads(bytes.substr(0, bytes.size() - 1) + "x"); });
    for (const std::size_t at : {8U, 16U, 40U}) {  // version, heads, the policy's name
      auto other = bytes;
      ++other[at];
      code(errc::corrupt_file, [&] { loads(other); });
    }
    std::ostream broken(nullptr);
    code(errc::corrupt_file, [&] { save(broken, p, kv, state); });
  }
}

}  // namespace error_test
