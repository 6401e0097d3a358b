// SPDX-License-Identifier: MIT
// Holds the oracle itself against what the authors' code computed, and against the paper's theorem,
// before the library is tested against the oracle.
#include "oracle/oracle.hpp"

#include <catch2/catch.hpp>

#include "oracle/random.hpp"
#include "oracle/replay.hpp"
#include "support/golden.hpp"

namespace oracle_test {

using oracle::decode;
using oracle::head;
using oracle::mat;
using oracle::normal;
using oracle::replay;
using oracle::same_slots;
using oracle::tensor;
using oracle::tolerance;
using oracle::vec;

TEST_CASE("the oracle's attention by hand", "[oracle]") {
  head h = oracle::make_head(1, 1, 1);
  append(h, {0}, {1});
  append(h, {std::log(3.0)}, {5});
  CHECK(attend(h, {{1}}).output[0][0] == Approx(4));
  CHECK(attend(h, {{1}}).lse[0] == Approx(std::log(4.0)));
  h.slots[0].log_mass = std::log(9.0);
  CHECK(attend(h, {{1}}).probabilities[0][0] == Approx(0.75));
  SECTION("logits of 1e4 overflow nothing") {
    const auto r = attend(h, {{1e4}, {-1e4}});
    CHECK(r.output[0][0] == Approx(5));
    CHECK(r.output[1][0] == Approx(1));
    CHECK(r.lse[0] == Approx(1e4 * std::log(3.0)));
  }
}

TEST_CASE("the oracle's column sums are those of one query at a time", "[oracle]") {
  head h = oracle::make_head(4, 2);
  const mat keys = normal(9, 4), values = normal(9, 4);
  const std::vector<int> at = {2, 5, 8};
  const tensor queries = {normal(2, 4), normal(2, 4), normal(2, 4)};
  vec total(9, 0.0), last(9, 0.0), decayed(9, 0.0);
  for (int t = 0, i = 0; t < 9; ++t) {
    append(h, keys[static_cast<std::size_t>(t)], values[static_cast<std::size_t>(t)]);
    if (t != at[static_cast<std::size_t>(i)]) continue;
    const auto a = attend(h, queries[static_cast<std::size_t>(i)]).probabilities;
    for (double& x : decayed) x *= 0.9;
    for (std::size_t j = 0; j < h.slots.size(); ++j) {
      total[j] += a[0][j] + a[1][j];
      decayed[j] += a[0][j] + a[1][j];
      if (i >= 1) last[j] += a[0][j] + a[1][j];
    }
    ++i;
  }
  const auto sums = column_scores(h, queries, at, {.window = 2, .decay = 0.9});
  CHECK(oracle::difference(sums.total, total) < 1e-14);
  CHECK(oracle::difference(sums.last, last) < 1e-14);
  CHECK(oracle::difference(sums.decayed, decayed) < 1e-14);
  const auto mean = column_scores(h, queries, at, {.group = oracle::combine::mean}).total;
  for (std::size_t j = 0; j < 9; ++j) CHECK(2 * mean[j] == Approx(total[j]));
}

TEST_CASE("the oracle keeps what StreamingLLM's code keeps", "[oracle][golden]") {
  const auto g = golden::load("streaming_llm");
  for (int h = 0; h < g.heads(); ++h) {
    replay r(g, h);
    r.prompt(oracle::streaming_llm{.sinks = g.number("sinks")},
             g.number("sinks") + g.number("recent"));
    same_slots(r.cache, r.stored(g, ""), false, false);
  }
}

TEST_CASE("the oracle's H2O is the authors' code", "[oracle][golden]") {
  const auto g = golden::load("h2o");
  const int target = g.number("heavy") + g.number("recent");
  const oracle::h2o policy{.recent = static_cast<double>(g.number("recent")) / target, .sinks = 0};
  for (int h = 0; h < g.heads(); ++h) {
    replay r(g, h);
    r.prompt(policy, target);
    same_slots(r.cache, r.stored(g, "prompt_", "prompt_score"), false, true);
    decode(r, g, policy, target, 0);
  }
}

TEST_CASE("the oracle's SnapKV is the authors' code when the border counts", "[oracle][golden]") {
  const auto g = golden::load("snapkv");
  const oracle::snapkv policy{
      .window = g.number("window"), .kernel = g.number("kernel"), .count_border = true};
  for (int h = 0; h < g.heads(); ++h) {
    replay r(g, h);
    r.prompt(policy, g.number("budget"));
    same_slots(r.cache, r.stored(g, ""), true, false);
  }
}

TEST_CASE("the oracle's ZSMerge is the authors' code", "[oracle][golden]") {
  for (const auto& g : golden::load("zsmerge").cases()) {
    const int target = g.number("budget");
    oracle::zsmerge policy{.residual = g.number("residual"),
                           .alpha = g.real("alpha"),
                           .decay = g.real("decay"),
                           .new_token_competes = false,
                           .score_sum = g.text("score_update") == "sum"};
    // The authors' prompt keeps one token more in the ring than their decode does.
    oracle::zsmerge at_prompt = policy;
    at_prompt.proximity = static_cast<double>(g.number("proximity_authors")) / target;
    policy.proximity = static_cast<double>(g.number("proximity_ring")) / target;
    for (int h = 0; h < g.heads(); ++h) {
      INFO("score " << g.text("score_update") << ", head " << h);
      replay r(g, h);
      head scored = r.cache;
      at_prompt.prompt(scored, r.prompt_queries, {}, 1000);
      for (auto& s : scored.slots) {
        const vec all = g.of_head("prompt_score", h, g.heads());
        CHECK(oracle::difference(s.score, all[static_cast<std::size_t>(s.position)]) < tolerance);
      }
      r.prompt(at_prompt, target);
      same_slots(r.cache, r.stored(g, "prompt_", "prompt_slot_score", policy.alpha), true, true);
      decode(r, g, policy, target, policy.alpha);
    }
  }
}

TEST_CASE("ZSMerge theorem 3.1: no uncompressed token loses attention", "[oracle]") {
  const double alpha = GENERATE(0.0, 0.6, 1.0);
  const bool nearest = GENERATE(false, true), competes = GENERATE(false, true);
  const oracle::zsmerge policy{
      .residual = 3, .alpha = alpha, .new_token_competes = competes, .nearest = nearest};
  const oracle::full_cache full;
  head all = oracle::make_head(6, 2);
  tensor queries;
  for (int t = 0; t < 40; ++t) {
    append(all, normal(6), normal(6));
    queries.push_back(normal(2, 6));
  }
  head cache = all;
  policy.prompt(cache, queries, {}, 20);
  REQUIRE(cache.slots.size() == 20);
  int merged = 0;
  for (int i = 0; i < 60; ++i) {
    const vec k = normal(6), v = normal(6);
    const mat q = normal(2, 6);
    policy.step(cache, q, k, v, 20);
    full.step(all, q, k, v, 0);
    REQUIRE(cache.slots.size() == 20);
    double tokens = 0;
    const mat probe = normal(2, 6);
    const auto ours = attend(cache, probe).probabilities;
    const auto theirs = attend(all, probe).probabilities;
    for (std::size_t j = 0; j < cache.slots.size(); ++j) {
      const auto& s = cache.slots[j];
      tokens += s.count;
      if (s.residual) {
        merged += s.count > 1;
        CHECK(s.log_mass == Approx(alpha * std::log(s.count)));
        continue;
      }
      for (std::size_t g = 0; g < 2; ++g)
        CHECK(ours[g][j] >= theirs[g][static_cast<std::size_t>(s.position)] - 1e-15);
    }
    CHECK(tokens == static_cast<double>(all.slots.size()));  // nothing is dropped
  }
  CHECK(merged > 0);
}

TEST_CASE("ZSMerge from an empty cache fills the residual slots first", "[oracle]") {
  const oracle::zsmerge policy{.proximity = 0.2, .residual = 3, .wait = GENERATE(false, true)};
  head cache = oracle::make_head(4);
  for (int t = 0; t < 40; ++t) {
    policy.step(cache, normal(1, 4), normal(4), normal(4), 20);
    const int residuals = static_cast<int>(
        std::count_if(cache.slots.begin(), cache.slots.end(), [](auto& s) { return s.residual; }));
    CHECK(static_cast<int>(cache.slots.size()) == std::min(t + 1, 20));
    CHECK(residuals == (policy.wait ? (t < 20 ? 0 : 3) : std::min(std::max(0, t + 1 - 17), 3)));
  }
}

TEST_CASE("SnapKV's oracle pools without the border unless asked", "[oracle]") {
  const oracle::snapkv policy{.window = 3, .kernel = 3};
  head h = oracle::make_head(1);
  for (int t = 0; t < 8; ++t) append(h, {0}, {1});
  const vec pooled = policy.pooled(h, {1, 2, 6, 4, 5, 100, 100, 100});
  CHECK(oracle::difference(pooled, {1.5, 3, 4, 5, 4.5, 0, 0, 0}) < 1e-15);
  const oracle::snapkv authors{.window = 3, .kernel = 3, .count_border = true};
  CHECK(authors.pooled(h, {1, 2, 6, 4, 5, 0, 0, 0})[0] == Approx(1));
}

TEST_CASE("SnapKV's oracle decodes by the window before and the one so far", "[oracle]") {
  const oracle::snapkv policy{.window = 3, .kernel = 3};
  head h = oracle::make_head(4);
  tensor queries;
  for (int t = 0; t < 8; ++t) {
    append(h, normal(4), normal(4));
    queries.push_back(normal(1, 4));
  }
  policy.prompt(h, queries, {}, 8);
  std::vector<vec> seen;  // attention of every step by position, newest last
  vec after_prompt(8, 0.0);
  for (const auto& s : h.slots) after_prompt[static_cast<std::size_t>(s.position)] = s.past;
  for (int i = 1; i <= 20; ++i) {
    const vec k = normal(4), v = normal(4);
    const mat q = normal(1, 4);
    head before = h;
    append(before, k, v);
    const vec a = attend(before, q).probabilities[0];
    seen.emplace_back(static_cast<std::size_t>(8 + i), 0.0);
    for (std::size_t j = 0; j < a.size(); ++j)
      seen.back()[static_cast<std::size_t>(before.slots[j].position)] = a[j];
    policy.step(h, q, k, v, 8);

    const int whole =
        i / 3;  // windows finished; the scores are of the last one and of what follows
    vec score(static_cast<std::size_t>(8 + i), 0.0);
    if (whole == 0) std::copy(after_prompt.begin(), after_prompt.end(), score.begin());
    for (int step = std::max(0, 3 * (whole - 1)); step < i; ++step)
      for (std::size_t p = 0; p < seen[static_cast<std::size_t>(step)].size(); ++p)
        score[p] += seen[static_cast<std::size_t>(step)][p];
    double lowest_kept = 1e9, highest_evicted = -1;
    int held = 0;
    for (const auto& s : before.slots) {
      const bool kept = std::any_of(h.slots.begin(), h.slots.end(),
                                    [&](const auto& x) { return x.position == s.position; });
      held += kept;
      if (s.position > newest(h) - 3) {
        CHECK(kept);
      } else {
        const double x = score[static_cast<std::size_t>(s.position)];
        kept ? lowest_kept = std::min(lowest_kept, x) : highest_evicted = x;
      }
    }
    CHECK(held == 8);
    CHECK(highest_evicted >= 0);
    CHECK(highest_evicted <= lowest_kept);
    for (const auto& s : h.slots)
      CHECK(s.past + s.current == Approx(score[static_cast<std::size_t>(s.position)]));
  }
}

TEST_CASE("applying a composed plan is applying both plans", "[oracle]") {
  head h = oracle::make_head(3);
  for (int t = 0; t < 5; ++t) append(h, normal(3), normal(3));
  const std::vector<oracle::plan_row> first = {{{{0, 1, 1}}, 0},
                                               {{{1, 0.25, 0.5}, {3, 0.75, 1.5}}, 0.7},
                                               {{{2, 0.4, 0.6}, {4, 0.6, 0.4}}, 1}};
  const std::vector<oracle::plan_row> second = {{{{0, 1, 1}}, 0},
                                                {{{1, 0.3, 0.2}, {2, 0.7, 0.8}}, 2}};
  const mat fix1 = normal(3, 3), fix2 = normal(2, 3);
  const auto one = dense(first, 5, fix1);
  const auto two = dense(second, 3, fix2);
  const head twice = apply_plan(apply_plan(h, one), two);
  const head once = apply_plan(h, compose(two, one));
  CHECK(set_difference(once, twice) < 1e-14);
  CHECK(once.slots[1].log_mass == 2);
  CHECK(apply_plan(h, first).slots[1].key[0] ==
        Approx(0.25 * h.slots[1].key[0] + 0.75 * h.slots[3].key[0]));
}

TEST_CASE("the oracle ranks ties to the lower slot and NaN last", "[oracle]") {
  const double nan = std::nan("");
  CHECK(oracle::top({1, nan, 3, 3, 0}, {0, 1, 2, 3, 4}, 3) == std::vector<std::size_t>{2, 3, 0});
  CHECK(oracle::top({nan, nan, 0}, {0, 1, 2}, 2) == std::vector<std::size_t>{2, 0});
}

TEST_CASE("the oracle says how clear its decisions were", "[oracle]") {
  const auto margin = [](const vec& score, std::size_t count, double unit = 0) {
    oracle::least_margin = std::numeric_limits<double>::infinity();
    oracle::top(score, {0, 1, 2}, count, unit);
    return oracle::least_margin;
  };
  constexpr double infinity = std::numeric_limits<double>::infinity();
  CHECK(margin({1, 4, 5}, 1) == Approx(0.2));
  CHECK(margin({1, 4, 5}, 2) == Approx(0.75));
  CHECK(margin({1, 4, 5}, 3) == infinity);  // all of them
  CHECK(margin({-1, 0, 0.25}, 1, 1) == Approx(0.25));
  CHECK(margin({4, 4, 1}, 1) == infinity);  // they tie
  CHECK(margin({1, 4, 5}, 1, oracle::exact) == infinity);
}

TEST_CASE("every run of a test draws from the beginning of its streams", "[random]") {
  const auto from_the_beginning = [](auto& stream) {
    const auto was = stream;
    streams::restart();
    return was == stream;
  };
  const auto some = static_cast<unsigned>(GENERATE(1, 2, 3));
  CHECK(from_the_beginning(streams::floats));
  CHECK(from_the_beginning(streams::doubles));
  streams::floats.discard(some), streams::doubles.discard(some);
  SECTION("one section") { streams::floats.discard(some); }
  SECTION("and another") { streams::doubles.discard(some); }
}

}  // namespace oracle_test
