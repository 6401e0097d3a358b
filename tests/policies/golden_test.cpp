// SPDX-License-Identifier: MIT
// The library against what the authors' own code computed (tests/data/golden; another folder of the
// same form through the environment variable KVMELD_GOLDEN).
#include "support/golden.hpp"

#include <catch2/catch.hpp>

#include "oracle/replay.hpp"
#include "support/fixtures.hpp"

namespace golden_test {

using fixtures::index_t;
using kvmeld::budget;

/// One head of a golden case in the library: its cache, its state, and the tokens to come.
template <class Policy>
struct replay {
  oracle::mat q, k, v;
  fixtures::cache<float> kv;
  fixtures::state state;
  index_t prompt;

  replay(const golden::record& g, int h, const Policy& policy)
      : q(g.of_head(g.has("q") ? "q" : "k", h, g.heads(), g.dim())),
        k(g.of_head("k", h, g.heads(), g.dim())),
        v(g.of_head(g.has("v") ? "v" : "k", h, g.heads(), g.dim())),
        kv({.heads = 1, .dim = g.dim(), .capacity = 64}),
        state(fixtures::make_state(policy, kv)),
        prompt(g.prompt()) {
    kv.append(0, floats(k, 0, prompt), floats(v, 0, prompt));
  }

  static std::vector<float> floats(const oracle::mat& m, index_t begin, index_t end) {
    std::vector<float> x;
    for (index_t t = begin; t < end; ++t) {
      for (const double y : m[static_cast<std::size_t>(t)]) {
        x.push_back(static_cast<float>(y));
      }
    }
    return x;
  }

  void compress(const Policy& policy, index_t target) {
    const auto queries = floats(q, 0, prompt);
    fixtures::compress(policy, kv, state,
                       kvmeld::prompt_queries(queries.data(), prompt, 1, 1, kv.shape().dim),
                       budget{target});
  }

  oracle::vec step(const Policy& policy, index_t i, index_t target) {
    const index_t t = prompt + i;
    std::vector<float> out(static_cast<std::size_t>(kv.shape().dim));
    fixtures::step(policy, kv, state,
                   {floats(q, t, t + 1), floats(k, t, t + 1), floats(v, t, t + 1)}, budget{target},
                   out);
    return {out.begin(), out.end()};
  }

  /// The slots, with the policy's column `score` and `count` where it has them.
  oracle::head slots(index_t score = -1, index_t count = -1) {
    auto h = fixtures::to_oracle(kv.head(0));
    for (std::size_t s = 0; s < h.slots.size(); ++s) {
      h.slots[s].score = score < 0 ? 0 : static_cast<double>(state[0].column(score)[s]);
      h.slots[s].count = count < 0 ? 1 : static_cast<double>(state[0].column(count)[s]);
    }
    return h;
  }
};

TEST_CASE("streaming_llm keeps what the authors' code keeps", "[golden]") {
  const auto g = golden::load("streaming_llm");
  const kvmeld::streaming_llm policy{.sinks = g.number("sinks")};
  for (int h = 0; h < g.heads(); ++h) {
    replay r(g, h, policy);
    r.compress(policy, g.number("sinks") + g.number("recent"));
    oracle::same_slots(r.slots(), oracle::replay(g, h).stored(g, ""), false, false);
  }
}

TEST_CASE("h2o is the authors' code", "[golden]") {
  const auto g = golden::load("h2o");
  const int target = g.number("heavy") + g.number("recent");
  const kvmeld::h2o policy{
      .recent = static_cast<float>(g.number("recent")) / static_cast<float>(target), .sinks = 0};
  for (int h = 0; h < g.heads(); ++h) {
    replay r(g, h, policy);
    const oracle::replay stored(g, h);
    r.compress(policy, target);
    oracle::same_slots(r.slots(0), stored.stored(g, "prompt_", "prompt_score"), false, true);
    for (int i = 0; i < g.steps(); ++i) {
      INFO("head " << h << ", step " << i);
      const auto out = r.step(policy, i, target);
      const auto expected = g.step(i);
      CHECK(oracle::difference(out, expected.of_head("output", h, g.heads())) < oracle::tolerance);
      if (expected.has("keys")) {
        oracle::same_slots(r.slots(0), stored.stored(expected, "", "score"), false, true);
      }
    }
  }
}

TEST_CASE("snapkv is the authors' code when the border counts", "[golden]") {
  const auto g = golden::load("snapkv");
  const kvmeld::snapkv policy{
      .window = g.number("window"), .sinks = 0, .kernel = g.number("kernel"), .count_border = true};
  for (int h = 0; h < g.heads(); ++h) {
    replay r(g, h, policy);
    r.compress(policy, g.number("budget"));
    oracle::same_slots(r.slots(), oracle::replay(g, h).stored(g, ""), true, false);
  }
}

TEST_CASE("zsmerge is the authors' code", "[golden]") {
  for (const auto& g : golden::load("zsmerge").cases()) {
    const int target = g.number("budget");
    kvmeld::zsmerge policy{.residual = g.number("residual"),
                           .sinks = 0,
                           .alpha = static_cast<float>(g.real("alpha")),
                           .decay = static_cast<float>(g.real("decay")),
                           .new_token_competes = false};
    policy.merged_score =
        g.text("score_update") == "sum" ? kvmeld::slot_reduce::sum : kvmeld::slot_reduce::max;
    // The authors' prompt keeps one token more in the ring than their decode does.
    const auto share = [&](const char* ring) {
      return static_cast<float>(g.number(ring)) / static_cast<float>(target);
    };
    kvmeld::zsmerge at_prompt = policy;
    at_prompt.proximity = share("proximity_authors");
    policy.proximity = share("proximity_ring");
    for (int h = 0; h < g.heads(); ++h) {
      replay r(g, h, at_prompt);
      const oracle::replay stored(g, h);
      r.compress(at_prompt, target);
      oracle::same_slots(r.slots(kvmeld::zsmerge::score, kvmeld::zsmerge::count),
                         stored.stored(g, "prompt_", "prompt_slot_score", g.real("alpha")), true,
                         true);
      for (int i = 0; i < g.steps(); ++i) {
        INFO("head " << h << ", step " << i);
        const auto out = r.step(policy, i, target);
        const auto expected = g.step(i);
        CHECK(oracle::difference(out, expected.of_head("output", h, g.heads())) <
              oracle::tolerance);
        if (expected.has("keys")) {
          oracle::same_slots(r.slots(kvmeld::zsmerge::score, kvmeld::zsmerge::count),
                             stored.stored(expected, "", "score", g.real("alpha")), true, true);
        }
      }
    }
  }
}

}  // namespace golden_test
