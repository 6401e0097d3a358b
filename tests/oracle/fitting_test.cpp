// SPDX-License-Identifier: MIT
// Holds the oracle's Attention Matching against tiny cases by hand and against what must hold of
// it.
#include <catch2/catch.hpp>

#include "oracle/oracle.hpp"
#include "oracle/random.hpp"

namespace fitting_test {

using oracle::attention_matching;
using oracle::head;
using oracle::mat;
using oracle::normal;
using oracle::random_head;
using oracle::random_queries;
using oracle::tensor;
using oracle::vec;

mat rows_of(const tensor& queries) {
  mat rows;
  for (const mat& q : queries) rows.insert(rows.end(), q.begin(), q.end());
  return rows;
}

double squared_error(const mat& a, const mat& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    for (std::size_t j = 0; j < a[i].size(); ++j) sum += (a[i][j] - b[i][j]) * (a[i][j] - b[i][j]);
  return sum;
}

double residual(const mat& a, const vec& b, const vec& x) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += std::pow(oracle::dot(a[i], x) - b[i], 2);
  return sum;
}

TEST_CASE("the oracle's non-negative least squares", "[oracle]") {
  CHECK(oracle::difference(oracle::nnls({{1, 0}, {0, 1}}, {2, -1}), vec{2, 0}) < 1e-15);
  CHECK(oracle::difference(oracle::nnls({{1, 1}, {0, 1}}, {1, 3}), vec{0, 2}) < 1e-15);
  CHECK(oracle::nnls_violation({{1, 0}, {0, 1}}, {2, -1}, {2, 0}) == 0);
  CHECK(oracle::nnls_violation({{1, 0}, {0, 1}}, {2, -1}, {1, 0}) == 0.5);
  CHECK(std::isinf(oracle::nnls_violation({{1, 0}, {0, 1}}, {2, -1}, {2, -1})));
  for (int trial = 0; trial < 20; ++trial) {
    mat a = normal(9, 6);
    if (trial % 2 == 0)
      for (vec& row : a)
        for (double& e : row) e = std::abs(e);
    const vec b = normal(9), x = oracle::nnls(a, b);
    CHECK(oracle::nnls_violation(a, b, x) < 1e-12);
    double best = residual(a, b, vec(6, 0.0));  // of all supports
    for (unsigned support = 1; support < 64; ++support) {
      mat part;
      for (const vec& row : a) {
        part.emplace_back();
        for (std::size_t j = 0; j < 6; ++j)
          if (support >> j & 1U) part.back().push_back(row[j]);
      }
      const vec s = oracle::least_squares(part, b);
      if (*std::min_element(s.begin(), s.end()) >= 0) best = std::min(best, residual(part, b, s));
    }
    CHECK(residual(a, b, x) == Approx(best));
  }
}

TEST_CASE("Attention Matching finds the token that stands for two", "[oracle]") {
  // Slots 1 and 2 have one key; 0 and 3 are asked for more. What stays of the pair weighs two and
  // has their mean value; what had log-mass keeps it.
  head h = oracle::make_head(3, 1, 1);
  append(h, {2, 0, 0}, {1, 0, 0});
  append(h, {0, 0, 1}, {0, 4, 0});
  append(h, {0, 0, 1}, {0, 0, 8});
  append(h, {0, 2, 0}, {5, 5, 5});
  h.slots[3].log_mass = std::log(3.0);
  tensor queries;
  for (int i = 0; i < 12; ++i) queries.push_back({{1 + 0.1 * i, 1.5 - 0.1 * i, 0.05 * i * i}});
  const attention_matching policy{.omp = GENERATE(false, true), .sinks = 0, .ridge = 1e-13};
  policy.prompt(h, queries, {}, 3);
  REQUIRE(h.slots.size() == 3);
  CHECK(positions(h) == std::vector<int>{0, 1, 3});
  CHECK(h.slots[0].log_mass == Approx(0).margin(1e-9));
  CHECK(h.slots[1].log_mass == Approx(std::log(2.0)));
  CHECK(h.slots[2].log_mass == Approx(std::log(3.0)));
  CHECK(oracle::difference(h.slots[1].value, vec{0, 2, 4}) < 1e-6);
  CHECK(oracle::difference(h.slots[2].value, vec{5, 5, 5}) < 1e-6);
}

TEST_CASE("OMP looks for the mass that is still missing", "[oracle]") {
  // Two heavy tokens much alike and a light one: the second of the heavy is all but paid for.
  head h = oracle::make_head(1, 1, 1);
  for (double k : {1.0, 0.9, 0.0}) append(h, {k}, {k});
  const tensor queries = {{{2}}, {{1}}, {{0.5}}};
  attention_matching policy{.omp = true, .sinks = 0, .a_round = 1};
  head basic = h;
  policy.prompt(h, queries, {}, 2);
  CHECK(positions(h) == std::vector<int>{0, 2});
  policy.omp = false;
  policy.prompt(basic, queries, {}, 2);
  CHECK(positions(basic) == std::vector<int>{0, 1});
}

TEST_CASE("Attention Matching fits what it keeps", "[oracle]") {
  const bool omp = GENERATE(false, true);
  const attention_matching policy{.omp = omp, .recent = 3};
  head full = random_head(60, 6, 2);
  full.slots[7].log_mass = 1.5;
  const tensor queries = random_queries(40, 2, 6);
  const mat rows = rows_of(queries);
  head h = full;
  policy.prompt(h, queries, {}, 20);
  REQUIRE(h.slots.size() == 20);
  const auto m = attention_matching::measured(full, queries);
  std::vector<std::size_t> kept;
  for (const auto& s : h.slots) kept.push_back(static_cast<std::size_t>(s.position));
  for (std::size_t p : {0U, 1U, 2U, 3U, 57U, 58U, 59U})
    CHECK(std::count(kept.begin(), kept.end(), p) == 1);
  mat a;
  vec x;
  for (const vec& row : m.mass) {
    a.emplace_back();
    for (std::size_t j : kept) a.back().push_back(row[j]);
  }
  for (const auto& s : h.slots) {
    CHECK(s.key == full.slots[static_cast<std::size_t>(s.position)].key);
    CHECK(s.log_mass >= (omp && s.position > 3 && s.position < 57 ? -7 : -30));
    x.push_back(s.log_mass > -30 ? std::exp(s.log_mass) : 0);
  }
  CHECK(oracle::nnls_violation(a, m.total, x) < 1e-10);
  // Fitting helps, and ridge least squares is where its gradient is zero.
  head evicted = h;
  for (auto& s : evicted.slots) s = full.slots[static_cast<std::size_t>(s.position)];
  const mat wanted = attend(full, rows).output, got = attend(h, rows).output;
  CHECK(squared_error(got, wanted) < 0.5 * squared_error(attend(evicted, rows).output, wanted));
  const mat p = attend(h, rows).probabilities;
  double trace = 0;
  for (const vec& row : p) trace += oracle::dot(row, row);
  const double l = policy.ridge * trace;
  for (std::size_t r = 0; r < kept.size(); ++r)
    for (std::size_t i = 0; i < 6; ++i) {
      double gradient = l * (h.slots[r].value[i] - full.slots[kept[r]].value[i]);
      for (std::size_t q = 0; q < p.size(); ++q) gradient += p[q][r] * (got[q][i] - wanted[q][i]);
      CHECK(std::abs(gradient) < 1e-12);
    }
}

TEST_CASE("OMP matches the mass better than the largest attention does", "[oracle]") {
  double basic = 0, omp = 0;
  for (int trial = 0; trial < 5; ++trial) {
    const head full = random_head(80, 5, 1);
    const tensor queries = random_queries(60, 1, 5);
    const mat rows = rows_of(queries);
    for (const bool pursuit : {false, true}) {
      head h = full;
      attention_matching{.omp = pursuit}.prompt(h, queries, {}, 24);
      const vec a = attend(full, rows).lse, b = attend(h, rows).lse;
      for (std::size_t q = 0; q < a.size(); ++q) (pursuit ? omp : basic) += std::abs(a[q] - b[q]);
    }
  }
  CHECK(omp < 0.8 * basic);
}

}  // namespace fitting_test
