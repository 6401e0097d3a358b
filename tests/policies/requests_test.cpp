// SPDX-License-Identifier: MIT
// What engines have asked for, held for every policy: prompts in chunks, hysteresis, and budgets
// that are refused with the number that would do.
#include <catch2/catch.hpp>
#include <map>
#include <regex>

#include "support/fixtures.hpp"
#include "support/policies.hpp"

namespace requests_test {

using fixtures::every_policy;
using kvmeld::budget;
using kvmeld::index_t;

constexpr index_t dim = 8, group = 2;

/// A stream of one head.
struct stream {
  kvmeld::any_policy_or_peer policy;
  fixtures::cache<float> kv;
  kvmeld::head_state state;
  kvmeld::workspace work;

  explicit stream(const kvmeld::any_policy_or_peer& p, index_t capacity = 400)
      : policy(p),
        kv({.heads = 1, .group = group, .dim = dim, .capacity = capacity}),
        state(kvmeld::make_head_state(p, kv.head(0))) {
    work.reserve(kv.head(0));
  }
  auto head() { return kv.head(0); }
  void append(index_t n) {
    const auto k = fixtures::normal(n * dim), v = fixtures::normal(n * dim);
    kv.append(0, k, v);
  }
  void step(const budget& b) {
    const auto q = fixtures::normal(group * dim), k = fixtures::normal(dim);
    std::vector<float> out(static_cast<std::size_t>(group * dim));
    check_step(policy, head(), b);
    kvmeld::step(policy, head(), state, work, q.data(), k.data(), k.data(), b, out.data());
  }
};

TEST_CASE("scores of a prompt in chunks of any size are those of the whole prompt", "[requests]") {
  constexpr index_t tokens = 90;
  const fixtures::queries queries(tokens, group, dim);
  auto examples = every_policy();
  examples.push_back({"compactor, chunks of 16", kvmeld::compactor{.chunk = 16}});
  examples.push_back({"ems, 32 in the window", kvmeld::ems{}});
  examples.push_back({"ems, entries shared", kvmeld::ems{.window = 8, .threshold = -1}});
  for (const auto& example : examples) {
    const auto& policy = example.policy;
    for (const int steps : {0, 30}) {  // a conversation: what came before was decoded, to 40 slots
      if (steps > 0 && !kvmeld::declared(policy).supports_decode()) {
        continue;
      }
      stream first(policy);
      first.append(steps > 0 ? 60 : 0);
      for (int t = 0; t < steps; ++t) {
        first.step({.slots = 40});
      }
      stream once = first;
      const index_t old = once.head().length();
      once.append(tokens);
      kvmeld::observe(policy, once.head(), once.state, queries.view());
      for (const index_t chunk : {1, 7, 40, 89, 90}) {
        INFO(example.name << ", behind " << old << " slots, chunks of " << chunk);
        stream chunks = first;
        for (index_t begin = 0; begin < tokens; begin += chunk) {
          const index_t n = std::min(chunk, tokens - begin);
          for (index_t s = old + begin; s < old + begin + n; ++s) {
            chunks.head().push(once.head().key(s).data, once.head().value(s).data);
          }
          auto own = queries.view();
          own.data += begin * own.row, own.count = n, own.before = begin;
          kvmeld::observe(policy, chunks.head(), chunks.state, own);
        }
        for (index_t c = 0; c < once.state.slot_stats(); ++c) {
          for (std::size_t s = 0; s < static_cast<std::size_t>(old + tokens); ++s) {
            INFO("column " << c << ", slot " << s);
            const float own = chunks.state.column(c)[s], whole = once.state.column(c)[s];
            // What was decoded has scores that no pass over a prompt may replace: the largest of
            // all passes stays.
            const bool any_pass = steps > 0 && example.name == "fold that scores in decode";
            CHECK((own == Approx(whole).epsilon(1e-4).margin(1e-6) || (any_pass && own > whole)));
          }
        }
        const auto memory = chunks.state.memory(), expected = once.state.memory();
        REQUIRE(memory.size() == expected.size());
        for (std::size_t i = 0; i < memory.size(); ++i) {
          INFO("memory " << i);
          CHECK(memory[i] == Approx(expected[i]).epsilon(1e-4).margin(1e-5));
        }
        CHECK(chunks.state.observed() == once.state.observed());
      }
    }
  }
}

TEST_CASE("a head goes from its trigger to its target, and grows again", "[requests]") {
  for (const auto& example : every_policy()) {
    const auto& policy = example.policy;
    if (!kvmeld::declared(policy).supports_decode() || !kvmeld::declared(policy).evicts() ||
        !example.exact) {
      continue;
    }
    for (const index_t trigger : {0, 41, 42, 60}) {
      INFO(example.name << ", trigger " << trigger);
      const budget b{.slots = 40, .trigger = trigger};
      stream one(policy, 60);
      index_t expected = 0;
      for (int t = 0; t < 130; ++t) {
        one.step(b);
        ++expected;
        expected = expected == (trigger == 0 ? 41 : trigger) ? 40 : expected;
        REQUIRE(one.head().length() == expected);
      }
    }
  }
}

TEST_CASE("a prompt goes to its target, whatever the trigger", "[requests]") {
  for (const auto& example : every_policy()) {
    if (kvmeld::declared(example.policy).evicts() && example.exact) {
      INFO(example.name);
      stream one(example.policy);
      one.append(50);
      const fixtures::queries queries(50, group, dim);
      kvmeld::observe(one.policy, one.head(), one.state, queries.view());
      kvmeld::compress(one.policy, one.head(), one.state, one.work, budget{40, 60}, queries.view());
      CHECK(one.head().length() == 40);
    }
  }
}

TEST_CASE("a budget within so many slots is one that the policy takes, and uses them all",
          "[requests]") {
  auto examples = every_policy();
  examples.push_back({"kvmerger, 8 at a time", kvmeld::kvmerger{.period = 8}});
  for (const auto& example : examples) {
    const auto& policy = example.policy;
    for (index_t slots = kvmeld::declared(policy).min_budget();
         kvmeld::declared(policy).evicts() && slots < 100; ++slots) {
      INFO(example.name << ", " << slots << " slots");
      const budget b = kvmeld::budget_within(policy, slots);
      CHECK(b.trigger_length() == slots + 1);
      CHECK(b.slots >= kvmeld::declared(policy).min_budget());
    }
  }
}

TEST_CASE("the smallest budgets are what the policies protect, and a slot to spare", "[requests]") {
  const std::map<std::string, index_t> expected = {{"streaming_llm", 4 + 1},
                                                   {"h2o", 4 + 4},  // half of it the latest
                                                   {"snapkv", 4 + 8 + 1},
                                                   {"zsmerge", 4 + 1 + 2 + 3},
                                                   {"d2o", 4 + 1},
                                                   {"d2o that counts", 4 + 1},
                                                   {"kvmerger", 4 + 2 + 1},
                                                   {"ems", 4 + 8 + 1},
                                                   {"ems un-rotated", 4 + 8 + 1},
                                                   {"keepkv", 4 + 4},
                                                   {"keepkv code", 4 + 4},
                                                   {"attention_matching", 4 + 4 + 1},
                                                   {"attention_matching omp", 4 + 4 + 1},
                                                   {"kvzip", 4 + 1},
                                                   {"fold", 4 + 2 + 2},
                                                   {"fold by scores", 4 + 8 + 2},
                                                   {"fold that scores in decode", 4 + 8 + 2},
                                                   {"random", 4 + 8 + 1},
                                                   {"random prompt", 4 + 8 + 1},
                                                   {"tova", 4 + 1},
                                                   {"roco", 4 + 10 + 1},
                                                   {"scissorhands", 4 + 10 + 1},
                                                   {"r_kv", 4 + 8 + 1},
                                                   {"key_diff", 4 + 4 + 1},
                                                   {"expected_attention", 4 + 1},
                                                   {"triattention", 4 + 1},
                                                   {"centroids", 4 + 8 + 1},
                                                   {"compactor", 4 + 4 + 1},
                                                   {"cam", 4 + 1},
                                                   {"dropkv", 4 + 8 + 1},
                                                   {"massfold", 4 + 8 + 1},
                                                   {"dropkv+massfold", 4 + 8 + 1}};
  for (const auto& example : every_policy()) {
    INFO(example.name);
    if (const auto least = expected.find(example.name); least != expected.end()) {
      CHECK(kvmeld::declared(example.policy).min_budget() == least->second);
    }
  }
  CHECK(kvmeld::declared(kvmeld::keepkv{.recent = 0}).min_budget() == 4 + 1);
  CHECK(kvmeld::declared(kvmeld::zsmerge{.proximity = 0.5F, .residual = 3}).min_budget() ==
        8 + 3 + 4 + 1);
}

TEST_CASE("a budget too small is refused with the number that would do", "[requests][errors]") {
  for (const auto& example : every_policy()) {
    const auto& policy = example.policy;
    if (!kvmeld::declared(policy).evicts()) {
      continue;
    }
    INFO(example.name);
    stream one(policy);
    one.append(100);
    const fixtures::queries queries(100, group, dim);
    kvmeld::observe(policy, one.head(), one.state, queries.view());
    const auto compress = [&](index_t target) {
      kvmeld::compress(policy, one.head(), one.state, one.work, budget{target}, queries.view());
    };
    std::string said = "a budget of at least 1 slots";
    for (index_t target = 1;; ++target) {
      try {
        stream copy = one;
        compress(target);
        CHECK(
            std::regex_search(said, std::regex("at least " + std::to_string(target) + " slots? ")));
        break;
      } catch (const kvmeld::error& e) {
        said = e.what();
        CHECK(one.head().length() == 100);
        REQUIRE(target < 100);
      }
    }
    for (index_t t = 0; t < 30 && kvmeld::declared(policy).supports_decode(); ++t) {
      one.step(budget{kvmeld::declared(policy).min_budget()});
      REQUIRE(one.head().length() <= kvmeld::declared(policy).min_budget());
    }
  }
}

}  // namespace requests_test
