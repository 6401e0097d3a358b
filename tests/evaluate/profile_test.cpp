/// A profile of thresholds: made, saved, and used in their place.
#include "evaluate/profile.hpp"

#include <catch2/catch.hpp>
#include <fstream>

#include "evaluate/names.hpp"
#include "evaluate/replay.hpp"
#include "support/tiny_model.hpp"

using test::fields;
using test::tiny_model;

namespace {

const std::string every_threshold[] = {"kvzip", "h2o+global", "fold+global"};

}  // namespace

TEST_CASE("a profile of a prompt's thresholds gives the same cache") {
  const tiny_model files;
  const auto model = engine::decoder::load(files.file(""));
  std::vector<int> tokens;
  for (const char c : engine::read_file(files.file("text.txt")).substr(0, 96)) {
    tokens.push_back(c);
  }
  const auto r = engine::prefill(model, tokens);
  int uneven = 0;
  for (const std::string& name : every_threshold) {
    CAPTURE(name);
    const std::vector<evaluate::named_policy> policies = {evaluate::detail::parse_policy(name)};
    const auto prompt =
        evaluate::measure(model.shape(), r, policies,
                          std::make_shared<evaluate::prompt_body>(model.shape(), r, 96, 140),
                          evaluate::replay_for(policies, model, r, tokens));
    evaluate::contender by_threshold{
        .policy = policies[0].policy, .limit = {40}, .budgets = policies[0].budgets};
    evaluate::set_sharing(by_threshold.policy, 40, 0);
    const auto shares = evaluate::threshold_budgets(by_threshold, 96, prompt.measured[0]);
    uneven += shares[0] != shares[1] ? 1 : 0;
    const auto profile = std::make_shared<kvfold::budget_profile>(2);
    profile->add(shares);
    auto by_profile = by_threshold;
    by_profile.profile = profile;
    for (std::size_t l = 0; l < 2; ++l) {
      evaluate::compressed_layer one(by_threshold, prompt, l), same(by_profile, prompt, l);
      const auto head = one.kv.head(0), other = same.kv.head(0);
      REQUIRE(head.length() == other.length());
      for (kvfold::index_t s = 0; s < head.length(); ++s) {
        CHECK(head.position(s) == other.position(s));
        CHECK(head.key(s)[0] == other.key(s)[0]);
      }
    }
  }
  CHECK(uneven >= 2);
}

TEST_CASE("evaluate makes a profile of its prompts, and goes by it where the file is there") {
  const tiny_model model;
  const auto file = model.file("profile").string();
  const auto run = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--tasks", "error,nll", "--policies", "h2o+global", "--prompts", "1"});
    return model.run(more);
  };
  const auto made = run({"--profile", file});
  CHECK(made.code == 0);
  CHECK_THAT(made.table, Catch::Contains("profile    " + file));
  const auto used = run({"--profile", file});
  CHECK(used.csv == made.csv);
  CHECK(used.csv == run({}).csv);
  CHECK_THAT(used.table, !Catch::Contains("profile    "));
  // Of another prompt's thresholds.
  CHECK(run({"--profile", file, "--seed", "2"}).csv != run({"--seed", "2"}).csv);
}

TEST_CASE("a profile of several policies, or of none, or of another model, is refused") {
  const tiny_model model;
  const auto file = model.file("profile").string();
  const auto refusal = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--tasks", "error", "--profile", file});
    try {
      model.run(more);
    } catch (const evaluate::usage_error& e) {
      return std::string(e.what());
    }
    return std::string("not refused");
  };
  CHECK_THAT(refusal({"--policies", "kvzip,h2o+global"}), Catch::Contains("2 came"));
  CHECK_THAT(refusal({"--policies", "kvzip", "--budgets", "30,40"}), Catch::Contains("2 came"));
  CHECK_THAT(refusal({"--policies", "h2o"}), Catch::Contains("0 came"));
  CHECK(!std::filesystem::exists(file));
  std::ofstream(file) << "something else";
  CHECK_THAT(refusal({"--policies", "kvzip"}), Catch::Contains("a saved profile expected"));
  kvfold::budget_profile other(3);
  std::ofstream out(file, std::ios::binary);
  save(out, other);
  out.close();
  CHECK_THAT(refusal({"--policies", "kvzip"}), Catch::Contains("a profile of 2 heads expected"));
}
