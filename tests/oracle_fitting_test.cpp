// Holds the oracle's Attention Matching and EMS against tiny cases by hand and against what must
// hold of them.
#include <catch2/catch.hpp>

#include "support/oracle.hpp"
#include "support/oracle_random.hpp"

using oracle::attention_matching;
using oracle::ems;
using oracle::head;
using oracle::mat;
using oracle::normal;
using oracle::tensor;
using oracle::vec;

namespace {

head random_head(int tokens, int dim, int group) {
  head h = oracle::make_head(dim, group);
  for (int t = 0; t < tokens; ++t) append(h, normal(dim), normal(dim));
  return h;
}

tensor random_queries(int n, int group, int dim) {
  tensor q;
  for (int t = 0; t < n; ++t) q.push_back(normal(group, dim));
  return q;
}

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

}  // namespace

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
  const double l =
      policy.ridge * oracle::largest_eigenvalue(oracle::times(oracle::transposed(p), p));
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

TEST_CASE("EMS by hand: one entry for two tokens, each with its norm", "[oracle]") {
  head h = oracle::make_head(2, 1, 1);
  append(h, {3, 0}, {1, 1});
  append(h, {0, 2}, {0, 5});
  append(h, {1, 0}, {4, 4});
  append(h, {0, 0.5}, {1, 0});
  const ems policy{.window = 1, .kernel = 1, .sinks = 0};
  const tensor queries = {{{1, 1}}};  // one query, at position 3: glo = loc, so s = a
  const vec a = attend(h, queries[0]).probabilities[0];
  head before = h;
  policy.prompt(h, queries, {}, 3);
  REQUIRE(h.slots.size() == 3);
  REQUIRE(h.slots[0].members.size() == 2);  // (1, 0) is the least and lies along (3, 0)
  CHECK(h.slots[0].members[1].position == 2);
  CHECK(h.slots[0].members[1].norm == 1);
  CHECK(h.slots[0].members[1].glo == Approx(a[2]));
  CHECK(oracle::difference(h.slots[0].key, vec{3, 0}) < 1e-15);
  CHECK(h.slots[0].value[0] == Approx((1 * a[0] + 4 * a[2]) / (a[0] + a[2])));
  CHECK(h.slots[1].value == vec{0, 5});
  // No key has changed its direction, so every query finds the mass it would have found.
  const mat probe = normal(6, 2);
  CHECK(oracle::difference(attend(ems::expanded(h), probe).lse, attend(before, probe).lse) < 1e-14);
  SECTION("another direction: the mean of the two, the lengths stay") {
    const double c = std::sqrt(0.5);
    before.slots[2].key = {c, c};
    before.slots[2].value = {1, 1};
    const vec b = attend(before, queries[0]).probabilities[0];
    policy.prompt(before, queries, {}, 3);
    const vec u = {b[0] + b[2] * c, b[2] * c};
    REQUIRE(before.slots[0].members.size() == 2);  // both keys at cos 0.71: values decide
    CHECK(before.slots[0].key[1] / before.slots[0].key[0] == Approx(u[1] / u[0]));
    CHECK(ems::norm(before.slots[0].key) == Approx(3));
    CHECK(ems::norm(ems::expanded(before).slots[1].key) == Approx(1));
  }
  SECTION("below the threshold, or alike by two opposites: the zero class") {
    const bool opposite = GENERATE(false, true);
    before.slots[2].key = {opposite ? -1.0 : 1.0, opposite ? 0.0 : 1.0};
    before.slots[2].value = {opposite ? -1.0 : 1.0, opposite ? -1.0 : 0.0};
    policy.prompt(before, queries, {}, 3);
    REQUIRE(before.slots.size() == 3);
    for (const auto& s : before.slots) CHECK(s.members.size() == 1);
    CHECK(before.slots[0].value == vec{1, 1});
  }
}

TEST_CASE("EMS keeps its promises over a prompt and decode", "[oracle]") {
  const double gamma = GENERATE(1.0, 1.5, 4.0);
  const ems policy{.window = 6, .sinks = 2, .gamma = gamma, .threshold = 0.1};
  head h = random_head(90, 4, 2);
  policy.prompt(h, random_queries(90, 2, 4), {}, 20);
  const auto holds = [&] {
    REQUIRE(h.slots.size() == 20);
    std::size_t all = 0;
    for (const auto& s : h.slots) {
      all += s.members.size();
      CHECK(s.members[0].position == s.position);
      CHECK(s.members[0].norm == Approx(ems::norm(s.key)));
      const bool safe = s.position < 2 || s.position > newest(h) - 6;
      if (safe) CHECK(s.members.size() == 1);
    }
    CHECK(static_cast<double>(all) <= std::floor(gamma * 20 + 0.5));
    return all;
  };
  const std::size_t after_prompt = holds();
  CHECK(after_prompt <= 8 + static_cast<std::size_t>(std::lround(gamma * 12)));
  if (gamma > 1) CHECK(after_prompt > 20);
  for (int t = 0; t < 50; ++t) {
    policy.step(h, normal(2, 4), normal(4), normal(4), 20);
    const std::size_t all = holds();
    if (gamma == 1) CHECK(all == 20);
  }
}

TEST_CASE("EMS loses nothing of tokens that are equal but for their norms", "[oracle]") {
  // Six kinds, keys and values at right angles: every kind shares an entry, whatever the scores.
  const ems policy{.window = 4, .sinks = 1, .gamma = 50};
  head h = oracle::make_head(8, 2), full = h;
  const oracle::full_cache whole;
  double weakest = 1;
  for (int t = 0; t < 120; ++t) {
    vec k(8, 0.0), v(8, 0.0);
    k[static_cast<std::size_t>(t % 6)] = 0.5 + std::abs(normal(1)[0]);
    v[static_cast<std::size_t>(t % 6)] = 3;
    const mat q = normal(2, 8);
    const mat ours = policy.step(h, q, k, v, 16), theirs = whole.step(full, q, k, v, 0);
    CHECK(oracle::difference(ours, theirs) < 1e-12);
    double mass = 0;
    for (const auto& s : h.slots) mass += static_cast<double>(s.members.size());
    weakest = std::min(weakest, mass / (t + 1));
  }
  CHECK(weakest == 1);
  CHECK(h.slots.size() == 16);
}

TEST_CASE("EMS scores: eq. 2, pooled, windows, the table's least", "[oracle]") {
  std::vector<oracle::ems_member> m = {{0, 1, 8, 1, 0}, {1, 1, 2, 0, 1}, {2, 1, 2, 3, 1}};
  std::vector<oracle::ems_member*> all = {&m[0], &m[1], &m[2]};
  // mean loc / mean glo = 6/12: max(4, 1), max(1, 1), max(1, 4)
  CHECK(ems::scores(all) == vec{4, 1, 4});
  const ems policy{.window = 1, .kernel = 3};
  CHECK(policy.pooled(all, {4, 1, 7}, 2) == vec{2.5, 2.5, 7});
  SECTION("two windows") {
    const ems short_window{.window = 3, .sinks = 0};
    head h = oracle::make_head(1, 1, 1);
    for (int t = 0; t < 4; ++t) short_window.step(h, {{0}}, {1}, {1}, 10);
    CHECK(h.slots[0].members[0].past == Approx(1 + 0.5 + 1 / 3.0));
    CHECK(h.slots[0].members[0].cur == Approx(0.25));
    CHECK(h.slots[0].members[0].glo == Approx(1 + 0.5 + 1 / 3.0 + 0.25));
  }
  SECTION("the least of those that are no centres makes room") {
    head h = oracle::make_head(1, 1, 1);
    for (int t = 0; t < 2; ++t) append(h, {1}, {1});
    h.slots[0].members = {{0, 1, 0, 0, 0}, {2, 1, 0, 0, 0}, {3, 1, 0, 0, 0}};
    h.slots[1].members = {{1, 1, 0, 0, 0}, {4, 1, 0, 0, 0}};
    ems::make_room(h, {0, 5, 3, 0, 3}, 4);
    CHECK(h.slots[0].members.size() == 3);
    CHECK(h.slots[1].members.size() == 1);  // of equals the later one
    ems::make_room(h, {0, 5, 3, 0}, 3);
    CHECK(h.slots[0].members.back().position == 2);
  }
  SECTION("without position, keys are compared as they were before rotation") {
    oracle::slot a, b;
    a.key = {1, 2, 3, 4};
    a.value = b.value = {1, 0, 0, 0};
    a.position = 3;
    b.position = 40;
    b.key = oracle::rotated(a.key, 37, {});
    CHECK(ems{.with_position = false}.redundancy(a, b) == Approx(1));
    CHECK(ems{}.redundancy(a, b) < 0.9);
  }
}
