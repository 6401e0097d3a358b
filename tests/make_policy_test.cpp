// SPDX-License-Identifier: MIT
// Policies from text: names, parameters, and what is refused.
#include "kvmeld/make_policy.hpp"

#include <catch2/catch.hpp>
#include <locale>
#include <set>

#include "support/policies.hpp"

namespace make_policy_test {

using kvmeld::any_policy;
using kvmeld::make_policy;

/// The policy inside, which is a `P`.
template <class P>
P inside(const any_policy& any) {
  P found;
  any.visit([&](const auto& p) {
    if constexpr (std::same_as<std::remove_cvref_t<decltype(p)>, P>) {
      found = p;
    } else {
      FAIL("another policy: " << p.name());
    }
  });
  return found;
}

void refuses(const std::string& message, std::string_view text) {
  INFO(text);
  CHECK_THROWS_AS(make_policy(text), kvmeld::error);
  CHECK_THROWS_WITH(make_policy(text), Catch::Contains(message));
}

TEST_CASE("a policy is made of its name and the parameters that are given", "[make_policy]") {
  CHECK(inside<kvmeld::fold>(make_policy("fold:share=0.4")).share == 0.4F);
  CHECK(inside<kvmeld::fold>(make_policy("fold")).share == kvmeld::fold{}.share);
  const auto p = inside<kvmeld::fold>(make_policy("fold:refine=3,sinks=2,recent_share=0.25"));
  CHECK((p.prompt.refine == 3 && p.sinks == 2 && p.recent_share == 0.25F));
  CHECK(inside<kvmeld::keepkv>(make_policy("keepkv:variant=1")).variant ==
        kvmeld::keepkv::mode::code);
  CHECK_FALSE(inside<kvmeld::kvmerger>(make_policy("kvmerger:gaps_break=0")).gaps_break);
  CHECK(inside<kvmeld::attention_matching>(make_policy("attention_matching:drop=-2.5")).drop ==
        -2.5F);
}

TEST_CASE("what folds is made of its scorer's name and parameters", "[make_policy]") {
  const auto p = inside<kvmeld::any_massfold>(make_policy("tova+massfold:sinks=2"));
  CHECK(p.name() == "tova+massfold");
  CHECK(p.min_budget() == 3);
  CHECK(inside<kvmeld::any_massfold>(make_policy("kvzip+massfold")).name() == "kvzip+massfold");
  CHECK(kvmeld::massfold{kvmeld::h2o{}}.name() == "h2o+massfold");
  refuses("kvzip+massfold, got 'key_diff+massfold'", "key_diff+massfold");
  refuses("tova+massfold: expected one of sinks, got 'window'", "tova+massfold:window=3");
}

TEST_CASE("every policy is found by its name, and each of its parameters by its own",
          "[make_policy]") {
  for (const any_policy& p : any_policy::every()) {
    CHECK(make_policy(p.name()).name() == p.name());
    p.visit([&](const auto& one) {
      if constexpr (requires { one.parameters(one, [](const char*, auto&) {}); }) {
        std::set<std::string> names;
        std::set<const void*> members;
        one.parameters(one, [&](const char* name, const auto& member) {
          INFO(p.name() << ": " << name);
          CHECK(names.insert(name).second);
          CHECK(members.insert(&member).second);
          const auto text = std::string(p.name()) + ":" + name + "=" +
                            std::to_string(static_cast<double>(member));
          CHECK_NOTHROW(make_policy(text));  // what it is by default
        });
        CHECK_FALSE(names.empty());
      }
    });
  }
}

TEST_CASE("numbers are decimal, whatever the locale", "[make_policy]") {
  struct comma : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
  };
  const std::locale before = std::locale::global(std::locale(std::locale(), new comma));
  const auto parsed = [](std::string_view text) { return kvmeld::detail::parse_number(text); };
  for (const auto& [text, value] : {std::pair{"0.4", 0.4},
                                    {"1.5", 1.5},
                                    {"-2.5e-3", -2.5e-3},
                                    {"7", 7.0},
                                    {"1000.125", 1000.125},
                                    {".5", 0.5},
                                    {"3.", 3.0},
                                    {"1E2", 100.0},
                                    {"-0", 0.0},
                                    {"123456", 123456.0}}) {
    CAPTURE(text);
    CHECK(parsed(text) == value);
  }
  for (const char* text : {"", "+1", " 1", "1 ", "0,4", "1.2.3", "0x10", "nan", "inf", "1e", "-",
                           "--1", "1e999", "e3", "1-2", "1.000,5"}) {
    CAPTURE(text);
    CHECK_FALSE(parsed(text).has_value());
  }
  std::locale::global(before);
}

TEST_CASE("names and values that no policy has are refused with those that there are",
          "[make_policy][errors]") {
  refuses("make_policy: expected one of full_cache, streaming_llm, h2o,", "h3o");
  refuses("snapkv+massfold, dropkv+massfold, h2o+massfold, tova+massfold, kvzip+massfold, got",
          "roco+massfold");
  refuses(", got 'h3o'", "h3o:sinks=1");
  refuses(", got ''", "");
  refuses("h2o: expected one of recent, sinks, got 'sink'", "h2o:sink=3");
  refuses("full_cache: expected no parameters, got 'sinks'", "full_cache:sinks=1");
  for (const char* text : {"h2o:sinks", "h2o:sinks=", "h2o:sinks=4x", "h2o:sinks=nan",
                           "h2o:sinks= 4", "h2o:recent=inf"}) {
    refuses("h2o: expected parameter=number, got '" + std::string(text).substr(4) + "'", text);
  }
  refuses("h2o: expected a whole number, got 'sinks=1.5'", "h2o:sinks=1.5");
  refuses("h2o: expected a whole number, got 'sinks=1e10'", "h2o:sinks=1e10");
  refuses("keepkv: expected 0 or 1, got 'variant=2'", "keepkv:variant=2");
  refuses("kvmerger: expected 0 or 1, got 'gaps_break=-1'", "kvmerger:gaps_break=-1");
  refuses("h2o: ", "h2o:recent=1.5");
  refuses("sinks, got -1", "h2o:recent=0.25,sinks=-1");
  refuses("random: expected a number of at least 0, got 'seed=-1'", "random:seed=-1");
  any_policy p(kvmeld::h2o{});
  CHECK_THROWS(set_parameter(p, "sinks=-1"));
  CHECK(inside<kvmeld::h2o>(p).sinks == kvmeld::h2o{}.sinks);
  kvmeld::h2o own;
  set_parameter(own, "sinks=7");
  CHECK(own.sinks == 7);
}

}  // namespace make_policy_test
