// SPDX-License-Identifier: MIT
/// What fold remembers between plans: queries, in 16 bits, or none.
#include <algorithm>  // std::ranges::all_of
#include <catch2/catch.hpp>
#include <cmath>  // std::isfinite

#include "../../examples/evaluate/reference_queries.hpp"
#include "kvmeld/kvmeld.hpp"
#include "support/fixtures.hpp"

namespace fold_memory_test {

using fixtures::index_t;
using kvmeld::budget;

TEST_CASE("fold that remembers no query has no state beside its columns, and decodes", "[fold]") {
  const kvmeld::fold policy{.decode = {.queries = 0}};
  CHECK(kvmeld::declared(policy).memory(64, 4, 100) == 6);  // counts, and what was scored
  auto kv = fixtures::random_cache(60, 8, 2, 80);
  auto state = fixtures::make_state(policy, kv);
  const fixtures::queries own(60, 2, 8);
  const auto reference = evaluate::lookahead(kv, own.view());
  fixtures::compress(policy, kv, state, reference.view(), budget{30});
  REQUIRE(kv.head(0).length() == 30);
  std::vector<float> out(16);
  for (int t = 0; t < 40; ++t) {
    const auto q = fixtures::normal(16), k = fixtures::normal(8), v = fixtures::normal(8);
    fixtures::step(policy, kv, state, {q, k, v}, kvmeld::budget_within(policy, 30), out);
    REQUIRE(kv.head(0).length() <= 30);
    CHECK(std::ranges::all_of(out, [](float x) { return std::isfinite(x); }));
  }
}

TEST_CASE("fold remembers a prompt's queries evenly spread, then every other step's", "[fold]") {
  const index_t count = GENERATE(10, 4), most = 6, tokens = 25;
  const kvmeld::fold policy{.decode = {.queries = most, .stride = 2}};
  auto kv = fixtures::random_cache(tokens, 3, 2, 40);
  auto state = fixtures::make_state(policy, kv);
  const fixtures::queries prompt(count, 2, 3);
  kvmeld::observe(policy, kv.head(0), state[0], prompt.view());
  const kvmeld::detail::fold_memory memory(state[0].memory(), {most, 2, 3});
  REQUIRE(memory.count() == std::min(count, most));
  const auto remembered = [&](index_t g, index_t i, index_t e) {
    float q[3];
    memory.query_of(g, i, q);
    return q[e];
  };
  const auto rounded = [](float x) { return static_cast<float>(static_cast<Eigen::bfloat16>(x)); };
  std::vector<index_t> expected;
  for (index_t i = 0; i < memory.count(); ++i) {
    const index_t from = i * count / memory.count();
    expected.push_back(tokens - count + from);
    CHECK(memory.position_of(i) == expected.back());
    for (index_t g = 0; g < 2; ++g) {
      for (index_t e = 0; e < 3; ++e) {
        CHECK(remembered(g, i, e) ==
              rounded(prompt.data[static_cast<std::size_t>((from * 2 + g) * 3 + e)]));
      }
    }
  }
  for (index_t t = 0; t < 5; ++t) {  // the newest is held until the next comes
    kv.append(0, fixtures::normal(3), fixtures::normal(3));
    const std::vector<float> p(2 * static_cast<std::size_t>(tokens + t + 1)), q(6, 1.0F + float(t));
    kvmeld::observe(policy, kv.head(0), state[0], state.workspace(),
                    {.probabilities = p, .query = q.data()});
    CHECK(memory.position_of(memory.count() - 1) == tokens + t);
    CHECK(remembered(1, memory.count() - 1, 2) == q[5]);
  }
  expected.insert(expected.end(), {25, 27, 29});
  expected.erase(expected.begin(), expected.end() - memory.count());
  for (index_t i = 0; i < memory.count(); ++i) {
    CHECK(memory.position_of(i) == expected[static_cast<std::size_t>(i)]);
  }
}

}  // namespace fold_memory_test
