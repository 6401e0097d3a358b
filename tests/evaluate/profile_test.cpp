// SPDX-License-Identifier: MIT
/// A profile of thresholds: made, saved, and used in their place.
#include "evaluate/profile.hpp"

#include <catch2/catch.hpp>
#include <fstream>
#include <iostream>

#include "evaluate/attention_error.hpp"
#include "evaluate/policies.hpp"
#include "evaluate/prompt.hpp"
#include "support/tiny_model.hpp"

namespace profile_test {

using test::fields;
using test::tiny_model;

const std::string every_threshold[] = {"kvzip", "h2o+global", "fold"};

/// The tiny model, and so many bytes of its text as tokens.
struct tiny_text {
  tiny_model files;
  engine::decoder model = engine::decoder::load(files.file(""));
  std::vector<int> tokens;

  explicit tiny_text(std::size_t count) {
    for (const char c : engine::read_file(files.file("text.txt")).substr(0, count)) {
      tokens.push_back(c);
    }
  }
  /// All of it as a prompt that one policy has measured.
  evaluate::prompt measured_by(const std::vector<evaluate::named_policy>& policies) const {
    const auto r = engine::prefill(model, tokens);
    const auto count = static_cast<kvmeld::index_t>(tokens.size());
    return evaluate::measure(
        model.shape(), r, policies,
        std::make_shared<evaluate::prompt_body>(model.shape(), r, count, count + 44),
        evaluate::replay_for(policies, model, r, tokens));
  }
};

TEST_CASE("a profile of a prompt's thresholds gives the same cache") {
  const tiny_text text(96);
  int uneven = 0;
  for (const std::string& name : every_threshold) {
    CAPTURE(name);
    const std::vector<evaluate::named_policy> policies = {evaluate::detail::parse_policy(name)};
    const auto prompt = text.measured_by(policies);
    evaluate::contender by_threshold{
        .policy = policies[0].policy, .limit = {40}, .budgets = policies[0].budgets};
    by_threshold.policy = kvmeld::for_shared(by_threshold.policy, 40, 0);
    auto whole = prompt.cache();
    const auto shares = evaluate::shared_budgets(by_threshold, whole, prompt.measured[0].heads);
    uneven += shares[0] != shares[1] ? 1 : 0;
    const auto profile = std::make_shared<kvmeld::budget_profile>(2);
    profile->add(shares);
    auto by_profile = by_threshold;
    by_profile.profile = profile;
    by_profile.budgets = evaluate::budget_allocation::profile;
    const evaluate::compressed_cache one(by_threshold, prompt), same(by_profile, prompt);
    for (const kvmeld::index_t h : {0, 1}) {
      const auto head = one.kv().head(h), other = same.kv().head(h);
      REQUIRE(head.length() == other.length());
      for (kvmeld::index_t s = 0; s < head.length(); ++s) {
        CHECK(head.position(s) == other.position(s));
        CHECK(head.key(s)[0] == other.key(s)[0]);
      }
    }
  }
  CHECK(uneven >= 2);
}

TEST_CASE("clusters of fold go by what heads' errors weigh, and all slots stay what they were") {
  const tiny_text text(96);
  const std::vector<evaluate::named_policy> policies = {evaluate::detail::parse_policy("fold")};
  const auto prompt = text.measured_by(policies);
  evaluate::contender one{
      .policy = policies[0].policy, .limit = {40}, .budgets = policies[0].budgets};
  one.policy = kvmeld::for_shared(one.policy, 40, 0);
  kvmeld::budget_profile profile(2);
  auto whole = prompt.cache();
  profile.add(evaluate::shared_budgets(one, whole, prompt.measured[0].heads));
  CHECK(evaluate::share_clusters(one.policy, profile, 96).empty());
  profile.add_errors(std::vector<double>{9, 1});
  CHECK(evaluate::share_clusters(kvmeld::h2o{}, profile, 96).empty());
  auto by_errors = one;
  by_errors.of_heads = evaluate::share_clusters(one.policy, profile, 96);
  REQUIRE(by_errors.of_heads.size() == 2);
  const auto clusters = [](const evaluate::any_policy& p) {
    return p.visit([](const auto& x) -> kvmeld::index_t {
      if constexpr (requires { x.clusters; }) {
        return x.clusters;
      }
      return 0;
    });
  };
  const kvmeld::index_t uniform = clusters(one.policy), more = clusters(by_errors.of_heads[0]);
  CHECK(more + clusters(by_errors.of_heads[1]) == 2 * uniform);
  CHECK(more == (2 * uniform * 3 + 2) / 4);
  kvmeld::index_t slots = 0;
  const evaluate::compressed_cache before(one, prompt), after(by_errors, prompt);
  for (const kvmeld::index_t h : {0, 1}) {
    const auto head = after.kv().head(h);
    slots += head.length();
    CHECK(head.length() - before.kv().head(h).length() ==
          clusters(by_errors.of_heads[static_cast<std::size_t>(h)]) - uniform);
    for (const kvmeld::index_t s : {0, 1, 2, 3}) {
      CHECK(head.position(s) == s);
    }
  }
  CHECK(slots == 80);
}

TEST_CASE("errors of heads are those of attention after the prompt, head by head") {
  const tiny_text text(400);
  const auto& model = text.model;
  const std::vector<evaluate::named_policy> policies = {evaluate::detail::parse_policy("h2o")};
  const auto p = evaluate::read_prompt(model, policies, text.tokens, 96, 8, 200, false, nullptr);
  const evaluate::contender c{.policy = policies[0].policy, .limit = {30}};
  evaluate::progress quiet(std::cerr, false);
  const evaluate::workers on(1, quiet);
  const auto errors = evaluate::errors_of_heads(c, model, p, on);
  REQUIRE(errors.size() == 2);
  const evaluate::compressed_cache cache(c, p.read);
  for (std::size_t l = 0; l < 2; ++l) {
    const auto attended =
        evaluate::attended(cache.kv(), static_cast<kvmeld::index_t>(l), p.future[l].tokens, true);
    const auto& w = model.parameters().layers[l].o.weight;
    double expected = 0;
    for (Eigen::Index t = 0; t < 8; ++t) {
      for (Eigen::Index head = 0; head < 2; ++head) {
        double added = 0;
        for (Eigen::Index out = 0; out < 16; ++out) {
          double x = 0;
          for (Eigen::Index i = 8 * head; i < 8 * head + 8; ++i) {
            x += double{w(out, i)} * (attended(t, i) - p.future[l].of_all(t, i));
          }
          added += x * x;
        }
        expected += added / (double{p.future[l].stream[t]} * p.future[l].stream[t]) / 8;
      }
    }
    CHECK(errors[l] > 0);
    CHECK(errors[l] == Approx(expected).epsilon(1e-3));
  }
}

TEST_CASE("evaluate makes a profile of its prompts, and +profile goes by it") {
  const tiny_model model;
  const auto file = model.file("profile").string();
  const auto run = [&](const std::string& division, std::vector<std::string> more) {
    more.insert(more.end(), {"--tasks", "nll", "--policies", "h2o+" + division, "--prompts", "1"});
    return model.run(more);
  };
  /// Its rows without the policies' names.
  const auto figures = [](const auto& ran) {
    std::vector<std::string> rows;
    for (const std::string& row : ran.csv) {
      rows.push_back(row.substr(row.find(',')));
    }
    return rows;
  };
  const auto made = run("global", {"--profile", file});
  CHECK(made.code == 0);
  CHECK_THAT(made.table, Catch::Contains("profile    " + file));
  const auto used = run("profile", {"--profile", file});
  CHECK(figures(used) == figures(made));
  CHECK_THAT(used.table, !Catch::Contains("profile    " + file));
  // Of another prompt's thresholds: a threshold stays its own.
  CHECK(figures(run("profile", {"--profile", file, "--seed", "2"})) !=
        figures(run("global", {"--seed", "2"})));
  CHECK(figures(run("global", {"--profile", file, "--seed", "2"})) ==
        figures(run("global", {"--seed", "2"})));
}

TEST_CASE("clusters go by the errors of a profile that is there, by a threshold too") {
  const tiny_model model;
  const auto file = model.file("profile").string();
  const auto run = [&](const std::string& seed, const std::string& from) {
    return model
        .run({"--tasks", "error", "--policies", "fold", "--budgets", "40", "--seed", seed,
              "--profile", from})
        .csv;
  };
  const auto before = run("1", file);
  const auto by_errors = run("1", file);
  CHECK(fields(before[1])["bytes"] == fields(by_errors[1])["bytes"]);
  CHECK(fields(before[1])["attention_error"] != fields(by_errors[1])["attention_error"]);
}

TEST_CASE("from an empty cache heads have equal slots, or those of a profile, in all as many") {
  const tiny_model files;
  const auto shape = engine::decoder::load(files.file("")).shape();
  const auto profile = std::make_shared<kvmeld::budget_profile>(2);
  profile->add(std::vector<kvmeld::index_t>{3, 9});
  for (const std::string name : {"h2o+profile", "fold+profile"}) {
    CAPTURE(name);
    const auto named = evaluate::detail::parse_policy(name);
    evaluate::contender c{.policy = named.policy,
                          .limit = {40},
                          .budgets = evaluate::budget_allocation::global,
                          .profile = profile};
    for (const kvmeld::index_t slots : evaluate::allocate_slots(c, 140, 2)) {
      CHECK(slots == 40);  // a threshold needs scores
    }
    c.budgets = named.budgets;
    c.policy = kvmeld::for_shared(c.policy, 40, 0);
    std::vector<kvmeld::index_t> most;
    const evaluate::compressed_cache cache(c, shape, 140);
    for (const kvmeld::index_t h : {0, 1}) {
      most.push_back(cache.meld().limit(h).trigger_length() - 1);
    }
    CHECK(cache.kv().capacity() == std::ranges::max(most) + 1);
    CHECK(most[0] + most[1] == 80);
    CHECK(most[0] < 40);
  }
}

/// A head with more clusters than the others protects more slots: its budget is of its own policy.
TEST_CASE("from an empty cache every head holds what its own policy protects") {
  const tiny_model files;
  const auto shape = engine::decoder::load(files.file("")).shape();
  const auto profile = std::make_shared<kvmeld::budget_profile>(2);
  profile->add(std::vector<kvmeld::index_t>{0, 12});
  profile->add_errors(std::vector<double>{9, 1});
  const auto named = evaluate::detail::parse_policy("fold+profile");
  evaluate::contender c{
      .policy = named.policy, .limit = {60}, .budgets = named.budgets, .profile = profile};
  c.policy = kvmeld::for_shared(c.policy, 60, 0);
  c.of_heads = evaluate::share_clusters(c.policy, *profile, 400);
  REQUIRE(c.of_heads.size() == 2);
  REQUIRE(kvmeld::declared(c.of_heads[0]).min_budget() > kvmeld::declared(c.policy).min_budget());
  const evaluate::compressed_cache cache(c, shape, 400);
  for (const kvmeld::index_t h : {0, 1}) {
    const kvmeld::budget& limit = cache.meld().limit(h);
    CHECK(limit.slots >= kvmeld::declared(c.of_heads[static_cast<std::size_t>(h)]).min_budget());
    CHECK(limit.trigger <= cache.kv().capacity());
  }
}

TEST_CASE("streams of slots that heads share are even ones, and by a profile as it has them") {
  const tiny_model model;
  const auto file = model.file("profile").string();
  const auto run = [&](const std::string& policy) {
    return model.run({"--tasks", "stream", "--policies", policy, "--prompts", "1", "--budgets",
                      "24", "--profile", file});
  };
  const auto error_of = [&](const std::string& policy) {
    return fields(run(policy).csv[1])["stream_error"];
  };
  const auto write = [&](const std::vector<kvmeld::index_t>& of_heads) {
    kvmeld::budget_profile made(2);
    made.add(of_heads);
    std::ofstream out(file, std::ios::binary);
    save(out, made);
  };
  CHECK(!error_of("h2o+global").empty());  // makes the file
  write({5, 5});
  CHECK(error_of("h2o+profile") == error_of("h2o"));
  write({1, 5});
  CHECK(error_of("h2o+global") == error_of("h2o"));
  CHECK(!error_of("h2o+profile").empty());
  CHECK(error_of("h2o+profile") != error_of("h2o"));
  CHECK(!error_of("fold+profile").empty());
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
  CHECK_THAT(refusal({"--policies", "kvzip,h2o+global"}),
             Catch::Contains(
                 "one policy by a global threshold (fold, kvzip, +global) at one budget, got 2"));
  CHECK_THAT(refusal({"--policies", "kvzip", "--budgets", "30,40"}), Catch::Contains("got 2"));
  CHECK_THAT(refusal({"--policies", "h2o"}), Catch::Contains("got 0"));
  CHECK_THAT(refusal({"--policies", "fold+profile"}),
             Catch::Contains("expected --profile with an existing file"));
  CHECK(!std::filesystem::exists(file));
  std::ofstream(file) << "something else";
  CHECK_THAT(refusal({"--policies", "kvzip"}), Catch::Contains("expected a saved profile, got"));
  kvmeld::budget_profile other(3);
  std::ofstream out(file, std::ios::binary);
  save(out, other);
  out.close();
  CHECK_THAT(refusal({"--policies", "kvzip"}), Catch::Contains("expected a profile of 2 heads"));
}

}  // namespace profile_test
