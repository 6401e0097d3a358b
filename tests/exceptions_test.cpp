// SPDX-License-Identifier: MIT
// What a caller's own executor or policy throws: caches stay as they were, or their lengths say
// which heads went on.
#include <catch2/catch.hpp>
#include <stdexcept>
#include <vector>

#include "support/fixtures.hpp"

namespace exceptions_test {

using kvmeld::budget;
using kvmeld::index_t;
using kvmeld::observation;

constexpr index_t heads = 4, group = 2, dim = 6, tokens = 20;

/// Keeps the newest, and throws when it is asked to plan, or to score.
struct moody {
  bool plans = true, scores = true;

  static constexpr std::string_view name() { return "moody"; }
  static constexpr std::array<kvmeld::slot_stat, 1> slot_stats() {
    return {kvmeld::slot_stat{kvmeld::slot_reduce::sum, 1}};
  }
  void observe(const kvmeld::kv_head auto&, kvmeld::head_state& state,
               const observation& observed) const {
    if (!scores) {
      throw std::runtime_error("a scorer's own");
    }
    std::ranges::copy(observed.attention, state.column(0).begin());
  }
  template <class T>
  void observe(const kvmeld::kv_head auto&, kvmeld::head_state&,
               const kvmeld::query_view<T>&) const {
    if (!scores) {
      throw std::runtime_error("a scorer's own");
    }
  }
  void plan(const kvmeld::kv_head auto& head, const kvmeld::head_state&, index_t target,
            kvmeld::slot_scratch&, kvmeld::merge_plan& out) const {
    if (!plans) {
      throw std::runtime_error("a policy's own");
    }
    out.reset(head.length());
    for (index_t s = head.length() - target; s < head.length(); ++s) {
      out.keep(s, head.log_mass(s));
    }
  }
};

/// Gives up once `after` heads are done, the last head first.
struct failing {
  index_t after;

  static constexpr index_t workers() { return 1; }
  template <class F>
  void operator()(index_t count, F f) const {
    for (index_t i = 0; i < count; ++i) {
      if (i == after) {
        throw std::runtime_error("an executor's own");
      }
      f(count - 1 - i, 0);
    }
  }
};

struct fixture {
  std::vector<moody> policies = std::vector<moody>(heads);
  fixtures::cache<float> kv = fixtures::random_cache(tokens, dim, group, tokens + 2, heads);
  fixtures::state state = fixtures::make_state(std::span<const moody>(policies), kv);
  std::vector<float> queries = fixtures::normal(tokens * heads * group * dim),
                     row = fixtures::normal(heads * dim),
                     out = std::vector<float>(heads * group * dim);
  std::vector<std::vector<float>> before;

  fixture() {
    for (index_t h = 0; h < heads; ++h) {
      before.push_back(fixtures::bytes_of(kv.head(h)));
    }
  }
  void compress() {
    fixtures::compress(std::span<const moody>(policies), kv, state,
                       kvmeld::prompt_queries(queries.data(), tokens, heads, group, dim),
                       budget{8});
  }
  kvmeld::step_input token() { return {std::span(queries).first(out.size()), row, row}; }
  void step() {
    fixtures::step(std::span<const moody>(policies), kv, state, token(), budget{tokens}, out);
  }
  bool untouched(index_t h) {
    return fixtures::bytes_of(kv.head(h)) == before[static_cast<std::size_t>(h)] &&
           kv.head(h).next_position() == tokens;
  }
};

TEST_CASE("what a policy throws in compress leaves its head as it was", "[errors]") {
  const bool scoring = GENERATE(false, true);
  fixture f;
  (scoring ? f.policies[2].scores : f.policies[2].plans) = false;
  CHECK_THROWS_AS(f.compress(), std::runtime_error);
  for (index_t h = 0; h < heads; ++h) {
    CHECK(f.kv.head(h).length() == (h < 2 ? 8 : tokens));
    CHECK((h < 2 || f.untouched(h)));
  }
  f.policies[2] = {};
  f.compress();  // those that are done stay as they are
  for (index_t h = 0; h < heads; ++h) {
    CHECK(f.kv.head(h).length() == 8);
    CHECK(f.kv.head(h).position(0) == tokens - 8);
  }
}

TEST_CASE("what a policy throws in a step comes out with the new token in, as the tokens seen say",
          "[errors]") {
  const bool scoring = GENERATE(false, true);
  fixture f;
  (scoring ? f.policies[2].scores : f.policies[2].plans) = false;
  CHECK_THROWS_AS(f.step(), std::runtime_error);
  for (index_t h = 0; h < heads; ++h) {
    CHECK(f.kv.head(h).next_position() == (h < 3 ? tokens + 1 : tokens));
    CHECK(f.kv.head(h).length() == (h == 2 ? tokens + 1 : tokens));
  }
  CHECK(f.untouched(3));
  const auto new_token = fixtures::bytes_of(f.kv.head(2));  // behind all that was there
  CHECK(std::equal(f.before[2].begin(), f.before[2].end(), new_token.begin()));
  f.policies[2] = {};
  f.step();  // it goes on
  CHECK(f.kv.head(2).length() == tokens);
  CHECK(f.kv.head(2).next_position() == tokens + 2);
}

TEST_CASE("what an executor throws leaves the heads that it did not run as they were",
          "[errors][executor]") {
  const index_t after = GENERATE(0, 1, 3);
  fixture compressed, stepped;
  kvmeld::compressor prompt(compressed.kv, moody{}, budget{8});
  prompt.prompt(compressed.kv.heads(0, 0),
                kvmeld::queries(compressed.queries, tokens, compressed.kv.spec()));
  CHECK_THROWS_WITH(prompt.end_prompt(0, failing{after}), "an executor's own");
  kvmeld::compressor steps(stepped.kv, moody{}, budget{tokens});
  CHECK_THROWS_WITH(
      steps.step(stepped.kv.heads(0, 0), stepped.token(), stepped.out, failing{after}),
      "an executor's own");
  for (index_t h = 0; h < heads; ++h) {
    const bool ran = heads - 1 - h < after;
    CHECK(compressed.kv.head(h).length() == (ran ? 8 : tokens));
    CHECK(stepped.kv.head(h).next_position() == (ran ? tokens + 1 : tokens));
    CHECK((ran || (compressed.untouched(h) && stepped.untouched(h))));
  }
}

}  // namespace exceptions_test
