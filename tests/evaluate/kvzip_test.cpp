// SPDX-License-Identifier: MIT
/// KVzip's second reading: scores are the oracle's, kept sets are kvpress's on the same tokens.
#include "oracle/kvzip.hpp"

#include <catch2/catch.hpp>
#include <fstream>
#include <nlohmann/json.hpp>

#include "evaluate/compressed_cache.hpp"
#include "evaluate/prompt.hpp"
#include "support/paths.hpp"
#include "support/tiny_model.hpp"

namespace evaluate_kvzip_test {

using evaluate::index_t;

evaluate::named_policy kvzip_with(evaluate::replay_words words) {
  return {.name = "kvzip",
          .policy = kvmeld::kvzip{},
          .queries = evaluate::query_source::replay,
          .budgets = evaluate::budget_allocation::global,
          .words = std::move(words)};
}

/// Rows of one head, `[tokens][dim]`.
oracle::mat rows_of(const engine::row_major_matrix& m, index_t h, index_t dim, Eigen::Index first,
                    Eigen::Index count) {
  oracle::mat rows;
  for (Eigen::Index t = first; t < first + count; ++t) {
    const float* const row = &m(t, Eigen::Index{h} * dim);
    rows.emplace_back(row, row + dim);
  }
  return rows;
}

TEST_CASE("a prompt that is read again part by part is scored as the oracle does", "[oracle]") {
  const test::tiny_model files;
  const auto model = engine::decoder::load(files.file(""));
  const engine::config& shape = model.shape();
  std::vector<int> tokens;
  for (const char c : engine::read_file(files.file("text.txt")).substr(0, 90)) {
    tokens.push_back(c);
  }
  const auto r = engine::prefill(model, tokens);
  auto policy = kvzip_with({.whole = {10, 11}, .part = {12}, .end = {13}});
  const evaluate::second_readings both{
      .repeated = evaluate::replay(model, r, tokens, policy.words, 60),
      .behind = {},
      .model = &model.parameters()};
  const auto& again = both.repeated;
  REQUIRE(again.parts == std::vector<index_t>{63, 40});
  const bool plus = GENERATE(false, true);
  policy.policy = kvmeld::kvzip{.plus = plus};
  const auto measured = evaluate::measure(policy, shape, r, both, 90);
  for (std::size_t l = 0; l < r.layers.size(); ++l) {
    CHECK(!measured.chosen[l]);
    oracle::head h = oracle::make_head(shape.dim, shape.group());
    const auto keys = rows_of(r.layers[l].k, 0, shape.dim, 0, 90);
    const auto values = rows_of(r.layers[l].v, 0, shape.dim, 0, 90);
    for (std::size_t j = 0; j < keys.size(); ++j) {
      append(h, keys[j], values[j]);
    }
    oracle::tensor projection;
    for (index_t g = 0; plus && g < shape.group(); ++g) {
      const auto& o = model.parameters().layers[l].o.weight;
      projection.push_back(rows_of(o, g, shape.dim, 0, o.rows()));
    }
    oracle::vec most(90, 0.0);
    Eigen::Index first = 0;
    for (const index_t count : again.parts) {
      oracle::tensor queries(static_cast<std::size_t>(count));
      for (index_t g = 0; g < shape.group(); ++g) {
        const auto of_head = rows_of(again.layers[l].q, g, shape.dim, first, count);
        for (std::size_t i = 0; i < queries.size(); ++i) {
          queries[i].push_back(of_head[i]);
        }
      }
      const float* const norms = again.layers[l].hidden_norm.data() + first;
      const auto s =
          oracle::kvzip::scores(h, rows_of(again.layers[l].k, 0, shape.dim, first, count), queries,
                                projection, oracle::vec(norms, norms + count));
      for (std::size_t j = 0; j < most.size(); ++j) {
        most[j] = std::max(most[j], s[j]);
      }
      first += count;
    }
    const auto ours = measured.heads[l].column(0);
    REQUIRE(ours.size() == most.size());
    for (std::size_t j = 0; j < most.size(); ++j) {
      CHECK(static_cast<double>(ours[j]) == Approx(most[j]).epsilon(1e-4));
    }
  }
}

TEST_CASE("kvzip keeps what kvpress's KVzipPress keeps of the same tokens", "[golden]") {
  const auto golden = nlohmann::json::parse(std::ifstream(paths::data("kvzip.json")));
  const auto tokens = golden.at("tokens").get<std::vector<int>>();
  const auto model = engine::decoder::load(std::filesystem::path(paths::models()) / "kvmeld-2m");
  const std::vector<evaluate::named_policy> policies = {
      kvzip_with({.whole = golden.at("words").get<std::vector<int>>(), .part = {}, .end = {}})};
  const auto r = engine::prefill(model, tokens);
  const auto length = static_cast<index_t>(tokens.size());
  const auto prompt =
      evaluate::measure(model.shape(), r, policies,
                        std::make_shared<evaluate::prompt_body>(model.shape(), r, length, length),
                        evaluate::replay_for(policies, model, r, tokens));
  for (const auto& [share, kept] : golden.at("kept").items()) {
    const auto slots = static_cast<index_t>(std::lround(std::stod(share) * length));
    const evaluate::contender chosen{
        .policy = policies[0].policy, .limit = {slots}, .budgets = policies[0].budgets};
    std::size_t common = 0, ours = 0, theirs = 0;
    const evaluate::compressed_cache cache(chosen, prompt);
    for (index_t h = 0; h < cache.kv().heads(); ++h) {
      const auto expected = kept.at(static_cast<std::size_t>(h)).get<std::vector<index_t>>();
      const auto head = cache.kv().head(h);
      for (index_t s = 0; s < head.length(); ++s) {
        common += static_cast<std::size_t>(std::ranges::count(expected, head.position(s)));
      }
      ours += static_cast<std::size_t>(head.length()), theirs += expected.size();
    }
    const double jaccard =
        static_cast<double>(common) / static_cast<double>(ours + theirs - common);
    INFO(share << ": " << ours << " and " << theirs << " kept, " << common << " by both");
    CHECK(ours == theirs);
    CHECK(jaccard >= 0.98);
  }
}

}  // namespace evaluate_kvzip_test
