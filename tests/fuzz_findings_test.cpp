// SPDX-License-Identifier: MIT
// What fuzzing (tests/fuzz) has found, one test each.
#include <catch2/catch.hpp>

#include "kvmeld/merge/plan.hpp"
#include "kvmeld/score/queries.hpp"
#include "support/fixtures.hpp"
#include "support/policies.hpp"

namespace fuzz_findings_test {

TEST_CASE("fuzz: a plan of less than no slots is refused, as any other", "[errors]") {
  for (const kvmeld::index_t length : {-1, -5, std::numeric_limits<kvmeld::index_t>::min()}) {
    kvmeld::merge_plan plan;
    plan.reset(length);
    CHECK_THROWS_AS(check(plan), kvmeld::error);  // it was std::length_error
    CHECK_THROWS_WITH(check(plan), Catch::Contains("expected at least 0 slots"));
  }
}

TEST_CASE("fuzz: no queries of any head are no queries", "[errors]") {
  const auto none = kvmeld::prompt_queries<float>(nullptr, 0, 3, 2, 4);
  for (const kvmeld::index_t h : {0, 1, 2}) {
    CHECK(none.of(h).data == nullptr);  // it was null and an offset
    CHECK(none.of(h).last(5).data == nullptr);
  }
}

TEST_CASE("fuzz: finite numbers break no plan while their products are finite", "[errors]") {
  using kvmeld::index_t;
  constexpr index_t dim = 4, group = 2, prompt = 30, steps = 60;
  for (const auto& example : fixtures::every_policy()) {
    const auto& p = example.policy;
    for (const float size : {1e10F, 1e19F, 4e34F}) {
      for (const index_t every : {1, 7}) {  // all keys, or some
        CAPTURE(example.name, size, every);
        fixtures::cache<float> kv(
            {.heads = 1, .group = group, .dim = dim, .capacity = 40, .check_finite = true});
        auto state = fixtures::make_state(p, kv);
        const auto token = [&](index_t t) {
          auto k = fixtures::normal(dim);
          for (float& x : k) {
            x = std::clamp(x, -1.0F, 1.0F) * (t % every == 0 ? size : 1.0F);
          }
          return k;
        };
        for (index_t t = 0; t < prompt; ++t) {
          kv.append(0, token(t), token(t));
        }
        const fixtures::queries queries(prompt, group, dim);
        const kvmeld::budget b{.slots = 24, .trigger = 26};
        CHECK_NOTHROW(
            kvmeld::compress(p, kv.head(0), state[0], state.workspace(), b, queries.view()));
        std::vector<float> out(group * dim);
        for (index_t t = 0;
             t < steps && kvmeld::declared(p).supports_decode() && kvmeld::declared(p).evicts();
             ++t) {
          const auto q = fixtures::normal(group * dim), k = token(t);
          REQUIRE_NOTHROW(kvmeld::step(p, kv.head(0), state[0], state.workspace(), q.data(),
                                       k.data(), k.data(), b, out.data()));
        }
      }
    }
  }
}

TEST_CASE("fuzz: values fitted where slots have no mass are finite", "[errors]") {
  fixtures::cache<float> kv(
      {.heads = 1, .group = 1, .dim = 1, .capacity = 40, .check_finite = true});
  const std::vector<float> keys = {-1.625F, 0,        3.6e-43F, 2.8e20F,  6.25F,
                                   6.8125F, 3.6e-43F, 2.8e20F,  -2.3125F, 6.6875F},
                           values = {6.8125F, 7.125F,  6.3125F,  6.9375F, 6.3125F,
                                     6.4375F, 5.9375F, 1.2e-23F, -1.625F, -1.625F};
  kv.append(0, keys, values);
  const kvmeld::fold policy;
  auto state = fixtures::make_state(policy, kv);
  const float query = 1.375F;
  CHECK_NOTHROW(fixtures::compress(policy, kv, state, kvmeld::prompt_queries(&query, 1, 1, 1, 1),
                                   kvmeld::budget{9}));  // a correction was −∞
}

TEST_CASE("fuzz: a step whose output is not finite leaves the state as it was", "[errors]") {
  for (const auto& example : fixtures::every_policy()) {
    CAPTURE(example.name);
    fixtures::cache<float> kv({.heads = 1, .group = 1, .dim = 2, .capacity = 8});
    auto state = fixtures::make_state(example.policy, kv);
    const std::vector<float> row = {1e38F, 1e38F};  // its products are infinite
    kv.append(0, row, row);                         // the state has not counted it yet
    std::vector<float> out(2);
    CHECK_THROWS_WITH(
        kvmeld::step(example.policy, kv.head(0), state[0], state.workspace(), row.data(),
                     row.data(), row.data(), kvmeld::budget{7}, out.data()),
        Catch::Contains("expected finite rows"));
    CHECK(state[0].length() == 0);  // it was 1
    CHECK(kv.head(0).length() == 1);
  }
}

}  // namespace fuzz_findings_test
