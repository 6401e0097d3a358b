// SPDX-License-Identifier: MIT
// Lookahead-max times leverage against the oracle's loops.
#include "kvmeld/score/prompt_scores.hpp"

#include <catch2/catch.hpp>
#include <numeric>

#include "support/fixtures.hpp"

namespace prompt_scores_test {

using fixtures::index_t;
using fixtures::normal;
using kvmeld::prompt_score_options;
using kvmeld::query_view;

std::size_t at(std::ptrdiff_t i) { return static_cast<std::size_t>(i); }

template <class Query>
std::vector<float> scores(const kvmeld::kv_head auto& head, const query_view<Query>& queries,
                          const prompt_score_options& options = {}) {
  std::vector<float> s(at(head.length()), 7.0F);
  kvmeld::prompt_scores(head, queries, options, s);
  return s;
}

template <class Query>
std::vector<int> positions_of(const kvmeld::kv_head auto& head, const query_view<Query>& queries) {
  std::vector<int> p;
  for (index_t i = 0; i < queries.count; ++i) {
    p.push_back(queries.position_of(i, head.next_position()));
  }
  return p;
}

/// Worst difference, as a share of what it should be where that is not small beside the largest.
double off(const std::vector<float>& ours, const oracle::vec& theirs) {
  REQUIRE(ours.size() == theirs.size());
  const double most = *std::ranges::max_element(theirs);
  double worst = 0;
  for (std::size_t j = 0; j < theirs.size(); ++j) {
    const double error = std::abs(static_cast<double>(ours[j]) - theirs[j]);
    worst = std::max(worst, std::isnan(error) ? 1e9 : error / (theirs[j] + 1e-4 * most + 1e-30));
  }
  return worst;
}

/// LAW: scores are the oracle's; with the prefill's log-sum-exp they are the same.
template <class Query>
void is_the_oracles(const kvmeld::kv_head auto& head, const query_view<Query>& queries,
                    double tolerance, index_t horizon = 64) {
  const index_t group = head.group();
  INFO(head.length() << " slots, " << queries.count << " queries, group of " << group << ", dim "
                     << head.dim());
  const oracle::head h = fixtures::to_oracle(head);
  const auto q = fixtures::to_tensor(queries, group, head.dim());
  const auto positions = positions_of(head, queries);
  const oracle::mat own = oracle::lookahead_max::own_log_sums(h, q, positions);
  std::vector<float> log_sum_exp;
  for (index_t g = 0; g < group; ++g) {
    for (const oracle::vec& of_group : own) {
      log_sum_exp.push_back(static_cast<float>(of_group[at(g)]));
    }
  }
  for (const bool leverage : {false, true}) {
    const auto theirs = oracle::lookahead_max{.horizon = horizon, .outliers = leverage}(
        h, q, positions, head.next_position());
    const prompt_score_options options{.horizon = horizon, .leverage = leverage};
    CHECK(off(scores(head, queries, options), theirs) < tolerance);
    auto given = queries;
    given.log_sum_exp = log_sum_exp.data();
    CHECK(off(scores(head, given, options), theirs) < tolerance);
  }
}

/// A chunk of a prompt behind what earlier ones became: positions with gaps, log-mass.
fixtures::cache<float> chunked_cache(index_t before, index_t chunk, index_t dim, index_t group) {
  auto kv = fixtures::random_cache(2 * before, dim, group, 2 * before + chunk);
  const auto head = kv.head(0);
  for (index_t s = 0; s < before; ++s) {
    head.position(s) = 2 * s + 1;
    head.log_mass(s) = normal(1)[0];
  }
  head.restore(before, 2 * before);
  kv.append(0, normal(chunk * dim), normal(chunk * dim));
  return kv;
}

TEST_CASE("scores of a prompt are the oracle's at every size around the blocks and tiles",
          "[oracle][prompt_scores]") {
  const index_t group = GENERATE(1, 3), dim = GENERATE(1, 7, 16);
  for (const index_t tokens : {1, 2, 15, 16, 17, 63, 64, 65, 130}) {
    auto kv = fixtures::random_cache(tokens, dim, group);
    const fixtures::queries queries(tokens, group, dim);
    is_the_oracles(kv.head(0), queries.view(), 1e-4);
  }
}

TEST_CASE("scores over more slots than a tile, and of fewer queries", "[oracle][prompt_scores]") {
  auto kv = fixtures::random_cache(530, 8, 2);
  const fixtures::queries queries(90, 2, 8, 2);
  is_the_oracles(kv.head(0), queries.view(), 1e-4);
  is_the_oracles(kv.head(0), queries.view(), 1e-4, 0);
}

TEST_CASE("scores of a prompt's chunk count log-mass and what each query saw",
          "[oracle][prompt_scores]") {
  const index_t group = GENERATE(1, 2);
  auto kv = chunked_cache(40, 30, 8, group);
  const fixtures::queries queries(30, group, 8);
  is_the_oracles(kv.head(0), queries.view(), 1e-4);
  const std::vector<index_t> positions(30, 0);  // queries that have seen nothing of their own
  auto chosen = queries.view();
  chosen.position = positions.data();
  is_the_oracles(kv.head(0), chosen, 1e-4);
}

TEST_CASE("scores stand logits of 1e4, zero keys and ties", "[oracle][prompt_scores]") {
  const index_t tokens = 70, dim = 16;
  auto kv = fixtures::random_cache(tokens, dim, 2);
  auto head = kv.head(0);
  SECTION("large") {
    const fixtures::queries queries(tokens, 2, dim, 1e4F);
    is_the_oracles(head, queries.view(), 3e-2);  // a logit's last place is worth 2e-3
    for (const float s : scores(head, queries.view())) {
      CHECK((std::isfinite(s) && s >= 0));
    }
  }
  SECTION("zero keys") {
    for (index_t s = 0; s < tokens; ++s) {
      for (index_t i = 0; i < dim; ++i) {
        head.key(s)[i] = 0;
      }
    }
    const fixtures::queries queries(tokens, 2, dim);
    is_the_oracles(head, queries.view(), 1e-4);
  }
  SECTION("ties") {
    for (index_t s = 30; s < 40; ++s) {
      for (index_t i = 0; i < dim; ++i) {
        head.key(s)[i] = head.key(30)[i], head.value(s)[i] = head.value(30)[i];
      }
    }
    const fixtures::queries queries(tokens, 2, dim);
    const auto s = scores(head, queries.view(), {.leverage = false});
    is_the_oracles(head, queries.view(), 1e-4);
    for (std::size_t j = 30; j < 40; ++j) {
      CHECK(s[j] == Approx(s[30]).epsilon(1e-5));
    }
  }
}

TEST_CASE("scores of half and bfloat16 rows are those of the floats that they hold",
          "[prompt_scores]") {
  auto kv = fixtures::random_cache<Eigen::bfloat16>(50, 8, 2);
  const auto q = normal<Eigen::half>(50 * 2 * 8);
  const auto queries = kvmeld::prompt_queries(q.data(), 50, 1, 2, 8);
  is_the_oracles(kv.head(0), queries, 1e-4);
}

TEST_CASE("a token that its successor looks up is scored, and no other pass is needed",
          "[prompt_scores]") {
  // What a fact is: one query, the token before it, whose key all others pass by.
  const index_t tokens = 200, dim = 16, fact = 100, asking = 150;
  auto kv = fixtures::random_cache(tokens, dim, 1);
  fixtures::queries queries(tokens, 1, dim, 0.1F);
  std::vector<float> key(at(dim));
  for (index_t i = 0; i < dim; ++i) {
    key[at(i)] = 30 * kv.head(0).key(fact)[i];
  }
  kvmeld::rotation turn(fixtures::default_rope, dim);
  turn.by(asking - (tokens + 64.0 * asking / tokens));
  turn(key.data());
  std::ranges::copy(key, &queries.data[at(asking * dim)]);
  const auto s = scores(kv.head(0), queries.view(), {.leverage = false});
  CHECK(std::ranges::max_element(s) - s.begin() == fact);
}

TEST_CASE("scores refuse what does not fit", "[errors][prompt_scores]") {
  using Catch::Contains;
  auto kv = fixtures::random_cache(9, 4, 2);
  const auto head = kv.head(0);
  const fixtures::queries queries(9, 2, 4);
  std::vector<float> s(9), other(8);
  CHECK_THROWS_WITH(kvmeld::prompt_scores(head, queries.view(), {}, other),
                    Contains("expected scores [9], got 8 floats"));
  CHECK_THROWS_WITH(kvmeld::prompt_scores(head, kvmeld::no_queries, {}, s),
                    Contains("expected at least 1 query, got 0"));
  CHECK_THROWS_WITH(kvmeld::prompt_scores(head, queries.view(), {.horizon = -1}, s),
                    Contains("expected a horizon of at least 0 positions, got -1"));
  auto empty = kv;
  empty.head(0).restore(0, 0);
  CHECK_THROWS_WITH(kvmeld::prompt_scores(empty.head(0), queries.view(), {}, s),
                    Contains("got an empty head"));
}

TEST_CASE("leverage of keys, of all or of some, is the oracle's in every width", "[oracle]") {
  for (const index_t dim : {2, 64, 80}) {
    for (const index_t tokens : {1, 20, 140}) {
      fixtures::cache<float> kv{{.heads = 1, .group = 1, .dim = dim, .capacity = tokens}};
      kv.append(0, normal(tokens * dim), normal(tokens * dim));
      const auto head = kv.head(0);
      const oracle::vec all =
          oracle::leverage(oracle::unrotated_keys(fixtures::to_oracle(head), {}), 0.1);
      for (const index_t each : {1, 3}) {
        CAPTURE(dim, tokens, each);
        const auto wanted = [&](index_t s) { return s % each == each - 1; };
        std::vector<float> scratch;
        const auto some = kvmeld::score::leverage_of_keys(head, 0.1F, wanted, scratch);
        REQUIRE(some.size() == at(tokens));
        for (index_t s = 0; s < tokens; ++s) {
          CHECK(some[at(s)] == (wanted(s) ? Approx(all[at(s)]).epsilon(1e-3).margin(1e-6)
                                          : Approx(-std::numeric_limits<float>::infinity())));
        }
      }
    }
  }
}

}  // namespace prompt_scores_test
