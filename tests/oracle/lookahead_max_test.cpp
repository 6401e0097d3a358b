// SPDX-License-Identifier: MIT
// What must hold of any lookahead-max, of the oracle's first.
#include "oracle/lookahead_max.hpp"

#include <catch2/catch.hpp>

#include "oracle/compare.hpp"
#include "oracle/random.hpp"

namespace lookahead_max_test {

using oracle::head;
using oracle::lookahead_max;
using oracle::mat;
using oracle::tensor;
using oracle::vec;

TEST_CASE("one token's lookahead-max is what it has beside its own first reading", "[oracle]") {
  // Both readings find the same one key: half of the mass each, if rotation takes nothing away.
  head h = oracle::make_head(4, 2);
  append(h, vec(4, 0.0), {3, 0, 4, 0});
  const lookahead_max rule{.outliers = false};
  CHECK(rule(h, oracle::random_queries(1, 2, 4), {}, 1)[0] == Approx(5 * 0.5));
}

TEST_CASE("zero keys share the mass of all that is read", "[oracle]") {
  head h = oracle::make_head(4, 1);
  for (int j = 0; j < 6; ++j) append(h, vec(4, 0.0), {1, 0, 0, 0});
  const vec s = lookahead_max{}(h, oracle::random_queries(6, 1, 4), {}, 6);
  // The first query saw one slot in its own reading, and sees six in the second.
  for (const double x : s) CHECK(x == Approx(1.0 / 7));
}

TEST_CASE("a key that one query asks for alone scores by that query", "[oracle]") {
  const int dim = 8, tokens = 40, asked = 11;
  head h = oracle::random_head(tokens, dim, 1);
  tensor queries(tokens, mat{vec(dim, 0.0)});
  const lookahead_max rule{.outliers = false};
  const vec before = rule(h, queries, {}, tokens);
  // Query 20 moves to tokens + 64 * 20 / 40 = tokens + 32; there it looks for the key of slot 11.
  const vec& key = h.slots[asked].key;
  vec q = oracle::rotated(key, 20 - (tokens + 32), {});
  for (double& x : q) x *= 40;
  queries[20][0] = q;
  const vec after = rule(h, queries, {}, tokens);
  CHECK(after[asked] ==
        Approx(std::sqrt(oracle::dot(h.slots[asked].value, h.slots[asked].value))).epsilon(0.01));
  for (std::size_t j = 0; j < after.size(); ++j) CHECK(after[j] >= before[j] - 1e-12);
}

}  // namespace lookahead_max_test
