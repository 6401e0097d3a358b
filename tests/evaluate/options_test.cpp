// SPDX-License-Identifier: MIT
/// What the command line says, and what it may not say.
#include <catch2/catch.hpp>

#include "evaluate/row.hpp"
#include "support/tiny_model.hpp"

namespace options_test {

using test::tiny_model;

TEST_CASE("budgets with a point are shares of the prompt, others slots") {
  const tiny_model model;
  const auto budgets = model.options({"--budgets", "64,0.1,1,1.0,10%"}).budgets;
  std::vector<std::string> as_given;
  for (const auto& one : budgets) {
    as_given.push_back(one.text());
  }
  CHECK(as_given == std::vector<std::string>{"64", "0.1", "1", "1.0", "10%"});
  REQUIRE(budgets.size() == 5);
  CHECK(budgets[0].slots(896) == 64);
  CHECK(budgets[1].slots(896) == 90);
  CHECK(budgets[2].slots(896) == 1);
  CHECK(budgets[3].slots(896) == 896);
}

TEST_CASE("an argument given twice counts as given last") {
  const tiny_model model;
  CHECK(model.options({"--seed", "3", "--seed", "4"}).seed == 4);
  CHECK(model.options({"--question", "a\\nb {key}"}).question == "a\nb {key}");
}

TEST_CASE("bad values are refused in one line before anything is run") {
  const tiny_model model;
  const std::vector<std::vector<std::string>> bad = {{"--policies", "h2o,chance"},
                                                     {"--policies", ""},
                                                     {"--budgets", "0"},
                                                     {"--budgets", "a"},
                                                     {"--budgets", "2.5"},
                                                     {"--budgets", "2.0"},
                                                     {"--budgets", "1.5"},
                                                     {"--budgets", "0.0"},
                                                     {"--budgets", "100%"},
                                                     {"--budgets", "%"},
                                                     {"--budgets", "0.1,-3"},
                                                     {"--budgets", "nan"},
                                                     {"--tasks", "errors"},
                                                     {"--prompt", "0"},
                                                     {"--prompt", "many"},
                                                     {"--prompts", "0"},
                                                     {"--room", "-1"},
                                                     {"--memory", "0"},
                                                     {"--memory", "nan"},
                                                     {"--threads", "0"},
                                                     {"--needle", "no fields"},
                                                     {"--question", "?"},
                                                     {"--model", "/nowhere"},
                                                     {"--text", "/nowhere"},
                                                     {"--unknown", "1"},
                                                     {"--digits", "0"},
                                                     {"--policies", "h2o+x"},
                                                     {"--policies", "random+ada_kv"},
                                                     {"--policies", "snapkv@own:3"},
                                                     {"--policies", "snapkv/int8"},
                                                     {"--policies", "snapkv/"},
                                                     {"--policies", "fold:share=2"},
                                                     {"--policies", "keepkv:variant=2"}};
  for (const auto& arguments : bad) {
    CAPTURE(arguments);
    std::string message;
    try {
      model.options(arguments);
    } catch (const evaluate::usage_error& error) {
      message = error.what();
    }
    CHECK_FALSE(message.empty());
    CHECK(message.find('\n') == std::string::npos);
  }
}

TEST_CASE("a policy's name ends in the storage of its slots") {
  const tiny_model model;
  const auto chosen =
      model.options({"--policies", "fold:share=0.4+global@lookahead:90/q8_0,h2o"}).policies;
  REQUIRE(chosen.size() == 2);
  CHECK(chosen[0].name == "fold:share=0.4+global@lookahead:90/q8_0");
  CHECK(chosen[0].storage == kvmeld::storage::q8_0);
  CHECK(chosen[0].budgets == evaluate::budget_allocation::global);
  CHECK(chosen[0].queries_taken == 90);
  CHECK(chosen[1].storage == kvmeld::storage::f32);
  CHECK(model.options({"--policies", "h2o/k8v4"}).policies[0].storage ==
        kvmeld::storage_pair(kvmeld::storage::k8, kvmeld::storage::q4_0, 8));
  CHECK(model.options({"--policies", "h2o/k6v4"}).policies[0].storage ==
        kvmeld::storage_pair(kvmeld::storage::k6, kvmeld::storage::q4_0, 8));
  CHECK(model.options({"--policies", "h2o/q4_0:newest=64,fold"}).policies[0].storage ==
        kvmeld::storage_pair(kvmeld::storage::q4_0, kvmeld::storage::q4_0, 64));
  CHECK(model.options({"--policies", "h2o/k4v4:newest=0"}).policies[0].storage ==
        kvmeld::storage_pair(kvmeld::storage::k4, kvmeld::storage::q4_0));
  for (const char* wrong : {"h2o/half:newest=4", "h2o/q8_0:newest=65",
                            "h2o/q8_0:newest=", "h2o/q8_0:latest=4", "h2o/q8_0:newest=4x"}) {
    CHECK_THROWS_WITH(model.options({"--policies", wrong}), Catch::Contains("newest=0 to 64"));
  }
}

TEST_CASE("fold shares the model's slots and takes queries of the positions to come") {
  const tiny_model model;
  const auto chosen =
      model.options({"--policies", "fold,fold+global,fold+equal,fold:pins=1+equal,h2o,kvzip+equal"})
          .policies;
  REQUIRE(chosen.size() == 6);
  using evaluate::budget_allocation;
  const auto by_scores = [](const evaluate::any_policy& p) {
    return kvmeld::declared(p).slot_stats().size() == 2;
  };
  for (const std::size_t i : {0U, 1U}) {
    CHECK(chosen[i].budgets == budget_allocation::global);
    CHECK(by_scores(chosen[i].measuring()));
  }
  for (const std::size_t i : {2U, 3U, 4U, 5U}) {
    CHECK(chosen[i].budgets == budget_allocation::uniform);
  }
  CHECK((!by_scores(chosen[2].measuring()) && by_scores(chosen[3].measuring())));
  for (const std::size_t i : {0U, 1U, 2U, 3U}) {
    CHECK(chosen[i].queries == evaluate::query_source::lookahead);
  }
  CHECK(chosen[4].queries == evaluate::query_source::own);
  CHECK(chosen[5].queries == evaluate::query_source::replay);
  CHECK(evaluate::source_of(kvmeld::attention_matching{}) == evaluate::query_source::spread);
}

TEST_CASE("csv: a name with several parameters is one field", "[evaluate]") {
  CHECK(evaluate::csv_field("h2o") == "h2o");
  CHECK(evaluate::csv_field("fold:rounds=6,share=0.4") == "\"fold:rounds=6,share=0.4\"");
  CHECK(evaluate::csv_field("a\"b\"") == "\"a\"\"b\"\"\"");
}

}  // namespace options_test
