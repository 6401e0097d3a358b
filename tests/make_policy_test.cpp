// SPDX-License-Identifier: MIT
// Policies from text: names, parameters, and what is refused.
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <locale>
#include <set>

#include "kvmeld/peers.hpp"
#include "support/policies.hpp"

namespace make_policy_test {

using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::set_option;

any_policy make_policy(std::string_view text) { return kvmeld::make_policy<any_policy>(text); }

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
  const auto p = inside<kvmeld::fold>(make_policy("fold:rounds=3,sinks=2,recent_share=0.25"));
  CHECK((p.prompt.rounds == 3 && p.sinks == 2 && p.recent_share == 0.25F));
  CHECK(inside<kvmeld::keepkv>(make_policy("keepkv:variant=1")).variant ==
        kvmeld::keepkv::mode::code);
  CHECK_FALSE(inside<kvmeld::kvmerger>(make_policy("kvmerger:gaps_break=0")).gaps_break);
  CHECK(inside<kvmeld::attention_matching>(make_policy("attention_matching:drop=-2.5")).drop ==
        -2.5F);
}

TEST_CASE("what folds is made of its scorer's name and parameters", "[make_policy]") {
  const auto p = inside<kvmeld::any_massfold>(make_policy("tova+massfold:sinks=2"));
  CHECK(p.name() == "tova+massfold");
  CHECK(kvmeld::declared(p).min_budget() == 3);
  CHECK(inside<kvmeld::any_massfold>(make_policy("kvzip+massfold")).name() == "kvzip+massfold");
  CHECK(kvmeld::massfold{kvmeld::h2o{}}.name() == "h2o+massfold");
  refuses("dropkv+massfold, got 'key_diff+massfold'", "key_diff+massfold");
  refuses("tova+massfold: expected one of sinks, combine, got 'window'", "tova+massfold:window=3");
}

TEST_CASE("every policy is found by its name, and is what its text says", "[make_policy]") {
  int without_end = 0;
  for (const any_policy& p : any_policy::every()) {
    CAPTURE(p.name());
    CHECK(make_policy(p.name()).name() == p.name());
    CHECK(kvmeld::text(p) == p.name());
    std::set<std::string_view> names;
    std::set<const void*> members;
    each_option(p, [&](const auto& option, const auto& owner) {
      CAPTURE(option.name);
      const auto& member = option.member(owner);
      CHECK(names.insert(option.name).second);
      CHECK(members.insert(&member).second);
      CHECK_FALSE(option.meaning.empty());
      const auto set = [&](double x) {
        return std::string(p.name()) + ":" + std::string(option.name) + "=" +
               kvmeld::detail::number_text(x);
      };
      CHECK_NOTHROW(make_policy(set(static_cast<double>(member))));  // what it is by default
      const auto refused = [&](const kvmeld::bound& end, double beyond) {
        if (std::isfinite(end.value)) {
          refuses(": expected " + std::string(option.name) + " in " + option.range() + ", got ",
                  set(end.open ? end.value : beyond));
        }
      };
      if (option.holds(kvmeld::endless.value)) {  // printed as it is read
        const std::string endless = set(kvmeld::endless.value);
        CHECK(kvmeld::text(make_policy(endless)) == endless);
        ++without_end;
      } else if (!std::is_integral_v<std::remove_cvref_t<decltype(member)>>) {
        refuses(": expected " + std::string(option.name) + " in " + option.range() + ", got inf",
                set(kvmeld::endless.value));
      }
      refused(option.low, option.low.value - 1);
      refused(option.high, 2 * option.high.value + 1);
    });
  }
  CHECK(without_end > 0);  // fold's fade
}

TEST_CASE("text says what is not as by default, and is read again", "[make_policy]") {
  const kvmeld::h2o p{.recent = 0.1F, .combine = kvmeld::group_combine::max};
  CHECK(kvmeld::text(p) == "h2o:recent=0.1,combine=2");
  CHECK(kvmeld::declared(inside<kvmeld::h2o>(make_policy(kvmeld::text(p)))) == kvmeld::declared(p));
  CHECK_FALSE(kvmeld::declared(kvmeld::h2o{}) == kvmeld::declared(p));
  const any_policy folds = make_policy("tova+massfold:sinks=2");
  CHECK(kvmeld::text(folds) == "tova+massfold:sinks=2");
  CHECK(kvmeld::text(make_policy("fold:fade=3.5,queries=0")) == "fold:queries=0,fade=3.5");
  CHECK(kvmeld::text(make_policy("random:seed=9007199254740992")) ==
        "random:seed=9007199254740992");
  // What a shared budget sets is none of the policy's options.
  CHECK(kvmeld::text(kvmeld::keepkv{.window = 8}.sharing(40)) == "keepkv:window=8");
  CHECK(kvmeld::text(kvmeld::kvmerger{}.sharing(40)) == "kvmerger");
}

TEST_CASE("NaN, infinity and what is negative are refused in C++ too", "[make_policy][errors]") {
  using kvmeld::validate;
  constexpr float nan = std::numeric_limits<float>::quiet_NaN(),
                  inf = std::numeric_limits<float>::infinity();
  CHECK_THROWS_WITH(validate(kvmeld::h2o{.recent = nan}),
                    "kvmeld: h2o: expected recent in [0, 1), got nan");
  CHECK_THROWS_WITH(validate(kvmeld::keepkv{.epsilon = inf}),
                    "kvmeld: keepkv: expected epsilon in (0, inf), got inf");
  CHECK_THROWS_WITH(validate(kvmeld::attention_matching{.drop = -inf}),
                    "kvmeld: attention_matching: expected drop in (-inf, inf), got -inf");
  CHECK_THROWS_WITH(validate(kvmeld::cam{.seed = static_cast<std::uint64_t>(-1)}),
                    Catch::Contains("cam: expected seed in [0, 9007199254740992], got 1"));
  refuses("random: expected seed in [0, 9007199254740992], got -1", "random:seed=-1");
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
  for (const char* text : {"", "+1", " 1", "1 ", "0,4", "1.2.3", "0x10", "nan", "-inf", "infinity",
                           "1e", "-", "--1", "1e999", "e3", "1-2", "1.000,5"}) {
    CAPTURE(text);
    CHECK_FALSE(parsed(text).has_value());
  }
  std::locale::global(before);
}

TEST_CASE("names and values that no policy has are refused with those that there are",
          "[make_policy][errors]") {
  refuses("make_policy: expected one of full_cache, streaming_llm, h2o,", "h3o");
  refuses("snapkv+massfold, h2o+massfold, tova+massfold, kvzip+massfold, attention_matching,",
          "roco+massfold");
  refuses(", got 'h3o'", "h3o:sinks=1");
  refuses(", got ''", "");
  refuses("h2o: expected one of recent, sinks, combine, got 'sink'", "h2o:sink=3");
  refuses("full_cache: expected no options, got 'sinks'", "full_cache:sinks=1");
  for (const char* text :
       {"h2o:sinks", "h2o:sinks=", "h2o:sinks=4x", "h2o:sinks=nan", "h2o:sinks= 4"}) {
    refuses("h2o: expected option=number, got '" + std::string(text).substr(4) + "'", text);
  }
  refuses("h2o: expected a whole number, got 'sinks=1.5'", "h2o:sinks=1.5");
  refuses("h2o: expected sinks in [0, 16777216], got 1e+10", "h2o:sinks=1e10");
  refuses("keepkv: expected variant in [0, 1], got 2", "keepkv:variant=2");
  refuses("kvmerger: expected gaps_break in [0, 1], got -1", "kvmerger:gaps_break=-1");
  refuses("h2o: ", "h2o:recent=1.5");
  refuses("sinks in [0, 16777216], got -1", "h2o:recent=0.25,sinks=-1");
  any_policy p(kvmeld::h2o{});
  CHECK_THROWS(set_option(p, "sinks=-1"));
  CHECK(inside<kvmeld::h2o>(p).sinks == kvmeld::h2o{}.sinks);
  kvmeld::h2o own;
  set_option(own, "sinks=7");
  CHECK(own.sinks == 7);
}

}  // namespace make_policy_test
