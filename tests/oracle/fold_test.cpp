// SPDX-License-Identifier: MIT
// Holds the oracle's fold against its prototypes' numbers (tests/data/fold_*.json: the prototypes
// of fold run in float64), and against what must hold of any fold.
#include <catch2/catch.hpp>
#include <fstream>

#include "oracle/oracle.hpp"
#include "oracle/random.hpp"
#include "support/golden.hpp"
#include "support/paths.hpp"

namespace oracle_fold_test {

using oracle::fold;
using oracle::head;
using oracle::mat;
using oracle::normal;
using oracle::random_head;
using oracle::random_queries;
using oracle::tensor;
using oracle::vec;

constexpr double digits = 1e-6;  // of the files: 7 digits of float64

golden::record load(const std::string& name) {
  std::ifstream file(paths::data(name + ".json"));
  REQUIRE(file);
  return golden::record(nlohmann::json::parse(file));
}

/// The prototypes look evenly.
oracle::ahead even(int horizon) { return {horizon, std::numeric_limits<double>::infinity()}; }

/// Queries [tokens][group][dim] of a case.
tensor queries_of(const golden::record& g) {
  const mat rows = g.of_head("q", 0, 1, g.dim());
  const auto group = static_cast<std::ptrdiff_t>(g.number("group"));
  tensor q;
  for (std::size_t at = 0; at < rows.size(); at += static_cast<std::size_t>(group))
    q.emplace_back(rows.begin() + static_cast<std::ptrdiff_t>(at),
                   rows.begin() + static_cast<std::ptrdiff_t>(at) + group);
  return q;
}

/// The slots are those stored, in order.
void same(const head& h, const golden::record& g) {
  const mat keys = g.of_head("keys", 0, 1, h.dim), values = g.of_head("values", 0, 1, h.dim);
  const vec beta = g.of_head("log_mass", 0, 1);
  REQUIRE(h.slots.size() == keys.size());
  for (std::size_t j = 0; j < keys.size(); ++j) {
    INFO("slot " << j);
    CHECK(oracle::difference(h.slots[j].key, keys[j]) < digits);
    CHECK(oracle::difference(h.slots[j].value, values[j]) < digits);
    CHECK(oracle::difference(h.slots[j].log_mass, beta[j]) < digits);
  }
}

/// Mean |o - o'| over queries that see both heads whole.
double error(const head& full, const head& other, const mat& rows) {
  double sum = 0;
  const mat a = attend(full, rows).output, b = attend(other, rows).output;
  for (std::size_t i = 0; i < a.size(); ++i)
    sum += std::sqrt(oracle::squared_distance(a[i], b[i])) / static_cast<double>(a.size());
  return sum;
}

TEST_CASE("the oracle's fold of a prompt is the prototype's", "[oracle][golden]") {
  for (const auto& g : load("fold_prompt").cases()) {
    INFO(g.text("name"));
    const fold policy{.queries = g.number("queries"),
                      .where = even(g.number("horizon")),
                      .sinks = g.number("sinks"),
                      .recent = g.number("recent"),
                      .outliers = g.real("share"),
                      .floor = g.real("floor"),
                      .rounds = g.number("rounds"),
                      .ridge = g.real("ridge")};
    head h = oracle::make_head(g.dim(), g.number("group"));
    const mat k = g.of_head("k", 0, 1, g.dim()), v = g.of_head("v", 0, 1, g.dim());
    for (std::size_t t = 0; t < k.size(); ++t) append(h, k[t], v[t]);
    policy.prompt(h, queries_of(g), {}, g.number("budget"));
    same(h, g);
  }
}

TEST_CASE("the oracle's fold in decode is the prototype's", "[oracle][golden]") {
  for (const auto& g : load("fold_stream").cases()) {
    INFO(g.text("name"));
    const fold policy{.where = even(g.number("horizon")),
                      .sinks = g.number("sinks"),
                      .outliers = g.real("share"),
                      .leverage_ridge = g.real("leverage_ridge"),
                      .period = g.number("period"),
                      .window = g.number("window"),
                      .stride = g.number("stride"),
                      .decode_recent = g.number("recent")};
    head h = oracle::make_head(g.dim(), g.number("group"));
    const mat k = g.of_head("k", 0, 1, g.dim()), v = g.of_head("v", 0, 1, g.dim());
    const tensor q = queries_of(g);
    int next = 0, caches = 0;
    for (std::size_t t = 0; t < k.size(); ++t) {
      INFO("token " << t);
      const mat out = policy.step(h, q[t], k[t], v[t], g.number("budget"));
      const golden::record expected = g.step(next);
      if (expected.number("at") != static_cast<int>(t)) continue;
      ++next;
      REQUIRE(static_cast<int>(h.slots.size()) == expected.number("length"));
      CHECK(oracle::difference(out, expected.of_head("output", 0, 1, g.dim())) < digits);
      if (!expected.has("keys")) continue;
      ++caches;
      same(h, expected);
      const vec positions = expected.of_head("positions", 0, 1),
                single = expected.of_head("single", 0, 1);
      for (std::size_t j = 0; j < h.slots.size(); ++j) {
        CHECK(h.slots[j].position == static_cast<int>(positions[j]));
        CHECK(h.slots[j].single == (single[j] != 0));
      }
    }
    CHECK(caches == 2);
    CHECK(next == g.steps());
  }
}

TEST_CASE("fold keeps pinned slots as they are and the mass on its queries", "[oracle]") {
  const fold policy{.queries = 40, .recent = 6, .lookahead = GENERATE(true, false)};
  head h = random_head(90, 6, 2);
  for (int j = 20; j < 30; ++j) {  // slots of a chunk folded before
    h.slots[static_cast<std::size_t>(j)].log_mass = 0.1 * j;
    h.slots[static_cast<std::size_t>(j)].single = false;
  }
  const head full = h;
  const tensor queries = random_queries(50, 2, 6);
  mat rows;
  if (policy.lookahead) {
    std::vector<int> at;
    for (int t = 40; t < 90; ++t) at.push_back(t);
    rows = foreseen(oracle::spread({queries, at}, 40), 90, {}, {});
    CHECK(rows.size() == 80);
  } else {
    for (const mat& q : queries) rows.insert(rows.end(), q.begin(), q.end());
  }
  policy.prompt(h, queries, {}, 30);
  REQUIRE(h.slots.size() == 30);
  const auto before = fold::measured(full, rows);
  int untouched = 0, unfitted = 0;
  double held = 0, all = 0;
  for (const auto& s : h.slots) {
    const auto& original = full.slots[static_cast<std::size_t>(s.position)];
    if (s.key == original.key && s.value == original.value && s.log_mass == original.log_mass) {
      ++untouched;
      CHECK(original.single);
    }
    for (std::size_t q = 0; q < rows.size(); ++q)
      held += std::exp(h.terms.alike(rows[q], s.key) + s.log_mass - before.lse[q]);
    unfitted += s.value == original.value ? 1 : 0;
  }
  for (const auto& p : before.probabilities)
    for (double x : p) all += x;
  CHECK(untouched == 4 + 6 + 5);  // sinks, recent, a quarter of the other 20
  CHECK(unfitted == 15);
  CHECK(held == Approx(all));  // each slot's mean mass is its members', so the sums agree too
  head unridged = full;
  fold plain = policy;
  plain.ridge = 1e9;
  plain.prompt(unridged, queries, {}, 30);
  CHECK(error(full, h, rows) < error(full, unridged, rows));
}

TEST_CASE("fold of equal tokens is exact", "[oracle]") {
  // Twelve different tokens, each eight times: as many slots lose nothing, whatever is asked.
  const bool queries_at_hand = GENERATE(true, false);
  head h = oracle::make_head(5, 1);
  const mat k = normal(12, 5), v = normal(12, 5);
  for (int t = 0; t < 96; ++t)
    append(h, k[static_cast<std::size_t>(t % 12)], v[static_cast<std::size_t>(t % 12)]);
  const head full = h;
  const fold policy{.sinks = 0, .recent = 0, .outliers = 0};
  policy.prompt(h, queries_at_hand ? random_queries(40, 1, 5) : tensor{}, {}, 12);
  REQUIRE(h.slots.size() == 12);
  CHECK(error(full, h, normal(20, 5)) < 1e-9);
  for (const auto& s : h.slots) CHECK(s.log_mass == Approx(std::log(8.0)));
}

TEST_CASE("fold without queries is the tangent", "[oracle]") {
  head h = oracle::make_head(1, 1, 1);
  for (double x : {0.0, 10.0, 10.2, 10.4, 30.0}) append(h, {x}, {2 * x});
  h.slots[2].log_mass = std::log(2.0);
  const fold policy{.sinks = 1, .recent = 1, .outliers = 0};
  policy.prompt(h, {}, {}, 3);
  REQUIRE(h.slots.size() == 3);
  CHECK(h.slots[1].position == 2);  // the heaviest of the middle is the seed
  CHECK(h.slots[1].key[0] == Approx(10.2));
  CHECK(h.slots[1].value[0] == Approx(20.4));
  CHECK(h.slots[1].log_mass == Approx(std::log(4.0)).epsilon(1e-5));
  CHECK(!h.slots[1].single);
}

TEST_CASE("fold's prompt comes in chunks and goes on in decode", "[oracle]") {
  const fold policy{.recent = 8};
  head h = oracle::make_head(8, 2), full = h;
  for (int chunk = 0; chunk < 3; ++chunk) {
    for (int t = 0; t < 40; ++t) {
      const vec k = normal(8), v = normal(8);
      append(h, k, v);
      append(full, k, v);
    }
    policy.prompt(h, random_queries(40, 2, 8), {}, 36);
    REQUIRE(h.slots.size() == 36);
  }
  double votes = 0;
  for (const auto& s : h.slots) votes += std::exp(s.log_mass);
  CHECK(votes > 60);  // of 120
  for (int t = 0; t < 60; ++t) {
    policy.step(h, normal(2, 8), normal(8), normal(8), 36, t < 30 ? 0 : 40);
    if (t < 30) CHECK(h.slots.size() == static_cast<std::size_t>(29 + t % 8));
    if (t >= 30) CHECK(h.slots.size() < 40);
    for (const auto& s : h.slots) CHECK(std::isfinite(s.log_mass));
  }
  CHECK(h.memory.queries.size() == static_cast<std::size_t>(policy.window * 8));
  CHECK_THROWS_AS(policy.prompt(h, {}, {}, 11), std::invalid_argument);
}

TEST_CASE("the oracle's linear algebra", "[oracle]") {
  const mat a = normal(7, 4), b = normal(7, 2), at = oracle::transposed(a);
  const mat normal_matrix = oracle::times(at, a);
  const mat l = oracle::cholesky(normal_matrix);
  CHECK(oracle::difference(oracle::times(l, oracle::transposed(l)), normal_matrix) < 1e-12);
  const mat x = oracle::ridge_around(a, b, oracle::zeros(4, 2), 0);
  mat rest = oracle::times(a, x);
  for (std::size_t i = 0; i < 7; ++i)
    for (std::size_t j = 0; j < 2; ++j) rest[i][j] -= b[i][j];
  CHECK(oracle::difference(oracle::times(at, rest), oracle::zeros(4, 2)) < 1e-12);
}

}  // namespace oracle_fold_test
