// SPDX-License-Identifier: MIT
// Attention Matching and its non-negative least squares, against their oracles and what must hold
// of any least-squares fit.
#include "kvmeld/peers/attention_matching.hpp"

#include <catch2/catch.hpp>

#include "kvmeld/peers.hpp"
#include "oracle/oracle.hpp"
#include "support/agree.hpp"

namespace attention_matching_test {

using fixtures::index_t;
using kvmeld::attention_matching;
using kvmeld::budget;

Eigen::MatrixXd dense(const oracle::mat& a) {
  Eigen::MatrixXd m(static_cast<Eigen::Index>(a.size()), static_cast<Eigen::Index>(a[0].size()));
  for (Eigen::Index r = 0; r < m.rows(); ++r) {
    for (Eigen::Index c = 0; c < m.cols(); ++c) {
      m(r, c) = a[static_cast<std::size_t>(r)][static_cast<std::size_t>(c)];
    }
  }
  return m;
}

oracle::vec nnls(const oracle::mat& a, const oracle::vec& b, const Eigen::VectorXd& start = {}) {
  const Eigen::MatrixXd m = dense(a);
  const Eigen::Map<const Eigen::VectorXd> wanted(b.data(), static_cast<Eigen::Index>(b.size()));
  const Eigen::VectorXd x =
      kvmeld::merge::nnls(Eigen::MatrixXd(m.transpose() * m), m.transpose() * wanted, start);
  return {x.data(), x.data() + x.size()};
}

/// Random, of any sign or as attention's masses are.
oracle::mat random_matrix(index_t rows, index_t columns, bool masses) {
  const auto x = fixtures::normal(rows * columns);
  oracle::mat a = fixtures::to_mat(x.data(), rows, columns);
  for (auto& row : a) {
    for (double& e : row) {
      e = masses ? std::exp(e) : e;
    }
  }
  return a;
}

double squared_error(const oracle::mat& a, const oracle::mat& b) {
  double sum = 0;
  for (std::size_t r = 0; r < a.size(); ++r) {
    for (std::size_t i = 0; i < a[r].size(); ++i) {
      sum += (a[r][i] - b[r][i]) * (a[r][i] - b[r][i]);
    }
  }
  return sum;
}

/// A head, some of it with log-mass, queries, and what the oracle makes of them.
template <class Scalar = float>
struct compared {
  fixtures::cache<Scalar> kv;
  fixtures::queries queries;
  oracle::head expected;

  compared(const oracle::attention_matching& o, index_t tokens, index_t dim, index_t group,
           index_t target, index_t value_dim, const fixtures::layer_terms& terms)
      : kv(fixtures::random_cache<Scalar>(
            tokens, terms.shape(1, group, dim, tokens + 1, fixtures::default_rope, value_dim))),
        queries(tokens, group, dim, 2) {
    kv.head(0).log_mass(11) = 2;
    kv.head(0).log_mass(12) = -3;
    expected = fixtures::to_oracle(kv.head(0));
    o.prompt(expected, queries.tensor(), {}, target);
  }
};

/// LAW: the policy's head is the oracle's.
template <class Scalar = float>
void agree(const attention_matching& policy, const oracle::attention_matching& o, index_t tokens,
           index_t dim, index_t group, index_t target, double tolerance = 1e-4,
           index_t value_dim = 0, const fixtures::layer_terms& terms = {}) {
  INFO(terms.name << ", dim " << dim << ", group " << group);
  auto [kv, queries, expected] = fixtures::clearly(
      [&] { return compared<Scalar>(o, tokens, dim, group, target, value_dim, terms); });
  auto state = fixtures::make_state(policy, kv);
  fixtures::compress(policy, kv, state, queries, target);
  CHECK(kv.head(0).length() == static_cast<index_t>(expected.slots.size()));
  CHECK(oracle::set_difference(fixtures::to_oracle(kv.head(0)), expected) < tolerance);
}

/// A head before and after compression, and the queries it was fitted on.
struct fitted {
  oracle::head full, made;
  oracle::mat rows;

  fitted(const attention_matching& policy, index_t tokens, index_t count, index_t target,
         float scale = 2) {
    auto kv = fixtures::random_cache(tokens, 8, 2);
    kv.head(0).log_mass(7) = 1.5F;
    full = fixtures::to_oracle(kv.head(0));
    const fixtures::queries queries(count, 2, 8, scale);
    auto state = fixtures::make_state(policy, kv);
    fixtures::compress(policy, kv, state, queries, target);
    made = fixtures::to_oracle(kv.head(0));
    rows = fixtures::to_mat(queries.data.data(), count * 2, 8);
  }
};

TEST_CASE("non-negative least squares is its oracle, and obeys Karush, Kuhn and Tucker",
          "[oracle]") {
  const bool masses = GENERATE(false, true);
  for (const index_t columns : {1, 2, 6, 17, 40}) {
    const oracle::mat a = random_matrix(50, columns, masses);
    oracle::vec b = fixtures::to_mat(fixtures::normal(50).data(), 1, 50)[0];
    for (double& e : b) {
      e = masses ? 3 * std::exp(e) : e;
    }
    const oracle::vec x = nnls(a, b);
    CHECK(oracle::nnls_violation(a, b, x) < 1e-12);
    CHECK(oracle::difference(x, oracle::nnls(a, b)) < 1e-9);
    // Wherever it begins, it ends there.
    CHECK(oracle::difference(nnls(a, b, Eigen::VectorXd::Ones(columns)), x) < 1e-9);
    Eigen::VectorXd few = Eigen::VectorXd::Zero(columns);
    few[columns / 2] = 100;
    CHECK(oracle::difference(nnls(a, b, few), x) < 1e-9);
  }
}

TEST_CASE("non-negative least squares of what determines nothing", "[hard]") {
  CHECK(nnls({{1, 0}, {0, 1}}, {-2, -1}) == oracle::vec{0, 0});
  CHECK(nnls({{0, 1}, {0, 0}}, {2, 1}) == oracle::vec{0, 2});
  oracle::mat a = random_matrix(12, 9, true);
  for (auto& row : a) {  // a column three times, one that is a sum, one that is all but another
    row[3] = row[5] = row[1];
    row[6] = row[0] + row[2];
    row[7] = row[4] * (1 + 1e-9);
  }
  const oracle::vec b(12, 4);
  CHECK(oracle::nnls_violation(a, b, nnls(a, b)) < 1e-8);
  CHECK(oracle::nnls_violation(a, b, nnls(a, b, Eigen::VectorXd::Ones(9))) < 1e-8);
  // More columns than rows: an exact fit.
  const oracle::mat wide = random_matrix(5, 30, true);
  const oracle::vec x = nnls(wide, oracle::times(wide, oracle::vec(30, 1.0)));
  CHECK(oracle::difference(oracle::times(wide, x), oracle::times(wide, oracle::vec(30, 1.0))) <
        1e-9);
}

TEST_CASE("attention_matching is its oracle", "[oracle]") {
  const bool omp = GENERATE(false, true);
  const index_t dim = GENERATE(7, 8, 16), group = GENERATE(1, 3);
  for (const index_t recent : {0, 5}) {
    const attention_matching policy{.omp = omp, .recent = recent};
    const oracle::attention_matching o{.omp = omp, .recent = recent};
    INFO("omp " << omp << ", dim " << dim << ", group " << group << ", recent " << recent);
    agree(policy, o, 90, dim, group, 30, 1e-4, 11);
    for (const fixtures::layer_terms& terms : fixtures::merged_terms) {
      agree(policy, o, 90, dim, group, 30, 1e-4, 0, terms);
    }
  }
}

TEST_CASE("attention_matching's pursuit is its oracle's: rounds and drops", "[oracle]") {
  const index_t a_round = GENERATE(1, 3, 100);
  const float drop = GENERATE(-7.0F, -1.0F);
  const attention_matching policy{.omp = true, .sinks = 2, .a_round = a_round, .drop = drop};
  const oracle::attention_matching o{
      .omp = true, .sinks = 2, .a_round = a_round, .drop = static_cast<double>(drop)};
  INFO("a round " << a_round << ", drop " << drop);
  agree(policy, o, 60, 8, 1, 25);
}

TEST_CASE("attention_matching's pursuit keeps no more slots than there are queries to fit",
          "[attention_matching]") {
  // Which ones is not determined: many of them match the mass exactly.
  const fitted f({.omp = true, .a_round = GENERATE(1, 4, 100)}, 60, 10, 40);
  CHECK(f.made.slots.size() <= 24);  // a slot for each query row, and the sinks
  const auto wanted = oracle::attend(f.full, f.rows), got = oracle::attend(f.made, f.rows);
  CHECK(oracle::difference(got.lse, wanted.lse) < 1e-5);
}

TEST_CASE("attention_matching of half and bfloat16 caches is its oracle", "[oracle]") {
  const bool omp = GENERATE(false, true);
  agree<Eigen::half>({.omp = omp}, {.omp = omp}, 60, 8, 2, 20, 1e-3);
  agree<Eigen::bfloat16>({.omp = omp}, {.omp = omp}, 60, 8, 2, 20, 1e-2);
}

TEST_CASE("attention_matching's log-masses are at the minimum", "[attention_matching]") {
  const attention_matching policy{.omp = GENERATE(false, true), .recent = 3};
  const fitted f(policy, 80, 50, 24);
  REQUIRE(f.made.slots.size() == 24);
  oracle::tensor queries;
  for (const auto& q : f.rows) {
    queries.push_back({q});
  }
  const auto m = oracle::attention_matching::measured(f.full, queries);
  oracle::mat a;
  oracle::vec x;
  for (const auto& row : m.mass) {
    a.emplace_back();
    for (const auto& s : f.made.slots) {
      a.back().push_back(row[static_cast<std::size_t>(s.position)]);
    }
  }
  for (const auto& s : f.made.slots) {
    CHECK(s.key == f.full.slots[static_cast<std::size_t>(s.position)].key);
    x.push_back(s.log_mass > -30 ? std::exp(s.log_mass) : 0);
  }
  CHECK(oracle::nnls_violation(a, m.total, x) < 1e-5);  // log-mass is a float
}

TEST_CASE("attention_matching matches mass and outputs better than its selection alone",
          "[attention_matching]") {
  const fitted f({.omp = GENERATE(false, true)}, 200, 150, 50, 1);
  oracle::head evicted = f.made;
  for (auto& s : evicted.slots) {
    s = f.full.slots[static_cast<std::size_t>(s.position)];
  }
  const auto wanted = oracle::attend(f.full, f.rows), got = oracle::attend(f.made, f.rows),
             without = oracle::attend(evicted, f.rows);
  double mass_off = 0, without_off = 0;
  for (std::size_t q = 0; q < f.rows.size(); ++q) {
    mass_off += std::pow(got.lse[q] - wanted.lse[q], 2);
    without_off += std::pow(without.lse[q] - wanted.lse[q], 2);
  }
  CHECK(mass_off < 0.25 * without_off);
  CHECK(squared_error(got.output, wanted.output) <
        0.5 * squared_error(without.output, wanted.output));
}

TEST_CASE("attention_matching needs queries, and compresses prompts only", "[errors]") {
  const attention_matching policy;
  auto kv = fixtures::random_cache(40, 4, 1, 50);
  auto state = fixtures::make_state(policy, kv);
  const auto before = fixtures::bytes_of(kv.head(0));
  CHECK_THROWS_WITH(fixtures::compress(policy, kv, state, kvmeld::no_queries, budget{20}),
                    Catch::Contains("attention_matching: expected reference queries"));
  kvmeld::slot_scratch scratch;
  kvmeld::merge_plan plan;
  state[0].extend(40);
  CHECK_THROWS_WITH(kvmeld::plan(policy, kv.head(0), state[0], 20, scratch, plan),
                    Catch::Contains("attention_matching: expected reference queries"));
  std::vector<float> out(4);
  CHECK_THROWS_WITH(fixtures::step(policy, kv, state,
                                   {fixtures::normal(4), fixtures::normal(4), fixtures::normal(4)},
                                   budget{41}, out),
                    Catch::Contains("expected a policy that decodes"));
  CHECK(fixtures::bytes_of(kv.head(0)) == before);
}

TEST_CASE("attention_matching of ties, zeros and huge logits stays finite", "[hard]") {
  const float scale = GENERATE(0.0F, 1.0F, 1e4F);
  const bool omp = GENERATE(false, true);
  auto kv = fixtures::random_cache(60, 4, 2, 70);
  for (index_t s = 10; s < 50; ++s) {
    for (index_t i = 0; i < 4; ++i) {
      kv.head(0).key(s)[i] = kv.head(0).key(0)[i] * scale;
    }
  }
  const attention_matching policy{.omp = omp};
  auto state = fixtures::make_state(policy, kv);
  fixtures::compress(policy, kv, state, fixtures::queries(60, 2, 4, scale).view(), budget{20});
  CHECK(kv.head(0).length() <= 20);
  CHECK((omp || kv.head(0).length() == 20));
  for (const float x : fixtures::bytes_of(kv.head(0))) {
    CHECK(std::isfinite(x));
  }
}

}  // namespace attention_matching_test
