// SPDX-License-Identifier: MIT
/// What heads look at, and in which order they retrieve.
#include "evaluate/heads.hpp"

#include <catch2/catch.hpp>

#include "evaluate/random.hpp"
#include "support/tiny_model.hpp"

namespace heads_test {

engine::row_major_matrix random_rows(evaluate::random_source& random, Eigen::Index rows,
                                     Eigen::Index columns) {
  engine::row_major_matrix m(rows, columns);
  for (Eigen::Index i = 0; i < m.size(); ++i) {
    m.data()[i] = static_cast<float>(4 * random.uniform() - 2);
  }
  return m;
}

TEST_CASE("a head's stats are shares of its causal attention") {
  engine::config shape;
  shape.layers = 2, shape.heads = 4, shape.kv_heads = 2, shape.dim = 3;
  evaluate::random_source random(1, 2, 3);
  const int tokens = 50, count = 5, fact = 7, fact_tokens = 6;
  engine::record r;
  for (int l = 0; l < shape.layers; ++l) {
    r.layers.push_back({random_rows(random, tokens, 12), random_rows(random, tokens, 6),
                        random_rows(random, tokens, 6)});
  }
  const auto stats = evaluate::head_stats_of(shape, r, count, fact, fact_tokens);
  REQUIRE(stats.size() == 8);
  for (int l = 0; l < shape.layers; ++l) {
    for (int h = 0; h < shape.heads; ++h) {
      double retrieval = 0, local = 0, sink = 0;
      for (int t = tokens - count; t < tokens; ++t) {
        double all = 0, at_fact = 0, at_latest = 0, at_first = 0;
        for (int s = 0; s <= t; ++s) {
          double dot = 0;
          for (int i = 0; i < shape.dim; ++i) {
            dot += double{r.layers[static_cast<std::size_t>(l)].q(t, h * 3 + i)} *
                   double{r.layers[static_cast<std::size_t>(l)].k(s, h / 2 * 3 + i)};
          }
          const double e = std::exp(dot / std::sqrt(3.0));
          all += e;
          at_fact += s >= fact && s < fact + fact_tokens ? e : 0;
          at_latest += s > t - evaluate::local_tokens ? e : 0;
          at_first += s < evaluate::sink_tokens ? e : 0;
        }
        retrieval += at_fact / all / count, local += at_latest / all / count,
            sink += at_first / all / count;
      }
      const auto& found = stats[static_cast<std::size_t>(l * shape.heads + h)];
      CHECK(found.retrieval == Approx(retrieval).epsilon(1e-4));
      CHECK(found.local == Approx(local).epsilon(1e-4));
      CHECK(found.sink == Approx(sink).epsilon(1e-4));
    }
  }
}

TEST_CASE("a KV head retrieves as much as the best of its query heads, ties in order") {
  const std::vector<evaluate::head_stats> stats = {{0.1}, {0.2}, {0.0}, {0.9},
                                                   {0.2}, {0.0}, {0.3}, {0.1}};
  CHECK(evaluate::by_retrieval(stats, 2) == std::vector<evaluate::index_t>{1, 3, 0, 2});
  CHECK(evaluate::by_retrieval({}, 2).empty());
}

TEST_CASE("heads that keep all are found by needles, or the row is refused") {
  const test::tiny_model model;
  const std::vector<std::string> common = {"--policies", "streaming_llm+duo_attention", "--budgets",
                                           "0.7"};
  auto with = common, without = common;
  with.insert(with.end(), {"--tasks", "error,needle"});
  without.insert(without.end(), {"--tasks", "error"});
  const auto csv = model.run(with).csv;
  REQUIRE(csv.size() == 2);
  CHECK(std::stod(test::fields(csv[1])["attention_error"]) > 0);
  const auto refused = model.run(without);
  CHECK(refused.csv.size() == 1);
  CHECK_THAT(refused.table, Catch::Contains("refused: --tasks needle finds its heads"));
}

}  // namespace heads_test
