// SPDX-License-Identifier: MIT
// KVzip against its oracle, and the engine's second reading: appended, observed, taken away.
#include "kvmeld/policies/kvzip.hpp"

#include <catch2/catch.hpp>

#include "oracle/compare.hpp"
#include "support/agree.hpp"

namespace policies_kvzip_test {

using fixtures::agree;
using fixtures::index_t;
using fixtures::setting;
using kvmeld::budget;
using kvmeld::kvzip;

std::size_t at(std::ptrdiff_t i) { return static_cast<std::size_t>(i); }

/// A second reading of one head's prompt: what an engine's forward pass made of it.
struct reading {
  std::vector<float> keys, values;
  fixtures::queries queries;

  reading(index_t tokens, index_t dim, index_t group, float scale = 1)
      : keys(fixtures::normal(tokens * dim)),
        values(fixtures::normal(tokens * dim)),
        queries(tokens, group, dim, scale) {}

  /// As docs/reference/policies.md tells an engine to do it.
  void observe(const kvzip& policy, fixtures::cache<float>& kv, fixtures::state& state) const {
    const auto head = kv.head(0);
    const index_t tokens = head.length(), seen = head.next_position();
    kv.append(0, keys, values);
    fixtures::observe(policy, kv, state, queries.view());
    head.restore(tokens, seen);
    state[0].truncate(tokens);
  }
  oracle::mat oracle_keys(index_t dim) const {
    oracle::mat rows;
    for (std::size_t i = 0; i < keys.size(); i += at(dim)) {
      rows.emplace_back(keys.begin() + static_cast<std::ptrdiff_t>(i),
                        keys.begin() + static_cast<std::ptrdiff_t>(i) + dim);
    }
    return rows;
  }
};

void is_the_oracles(std::span<const float> ours, const oracle::vec& theirs) {
  REQUIRE(ours.size() == theirs.size());
  for (std::size_t j = 0; j < theirs.size(); ++j) {
    CHECK(static_cast<double>(ours[j]) == Approx(theirs[j]).epsilon(1e-4).margin(1e-9));
  }
}

TEST_CASE("kvzip is its oracle", "[oracle]") {
  for (const setting& s :
       {setting{100, 8, 1, 40, 0}, {100, 33, 2, 41, 0}, {257, 16, 4, 64, 0}, {60, 1, 1, 30, 0}}) {
    agree(kvzip{}, oracle::kvzip{}, s);
    agree(kvzip{.sinks = 0, .recent = 6}, oracle::kvzip{.sinks = 0, .recent = 6}, s);
  }
  agree<Eigen::half>(kvzip{}, oracle::kvzip{}, {80, 16, 2, 40, 0}, 1e-2);
  agree<Eigen::bfloat16>(kvzip{}, oracle::kvzip{}, {80, 16, 2, 40, 0}, 5e-2);
}

TEST_CASE("a second reading scores as the oracle does, and leaves the cache as it was",
          "[oracle]") {
  const index_t group = GENERATE(1, 3), dim = 8, tokens = 70, again = 83;
  const fixtures::layer_terms terms = GENERATE(from_range(fixtures::evicted_terms));
  INFO(terms.name << ", group " << group);
  auto kv = fixtures::random_cache(tokens, terms.shape(1, group, dim, tokens + again));
  kv.head(0).log_mass(7) = 1.5F;
  const kvzip policy;
  auto state = fixtures::make_state(policy, kv);
  const auto before = fixtures::bytes_of(kv.head(0));
  const reading second(again, dim, group, 2);
  second.observe(policy, kv, state);
  CHECK(fixtures::bytes_of(kv.head(0)) == before);
  CHECK(kv.head(0).next_position() == tokens);

  oracle::head h = fixtures::to_oracle(kv.head(0));
  const auto score = oracle::kvzip::scores(h, second.oracle_keys(dim),
                                           fixtures::to_tensor(second.queries.view(), group, dim));
  is_the_oracles(state[0].column(0), score);
  fixtures::compress(policy, kv, state, kvmeld::no_queries, budget{20});
  oracle::kvzip{}.evict_to(h, score, 20);
  REQUIRE(kv.head(0).length() == 20);
  CHECK(oracle::set_difference(fixtures::to_oracle(kv.head(0)), h) < 1e-5);
}

TEST_CASE("kvzip+ scores as its oracle does, and refuses without a projection or norms",
          "[oracle][errors]") {
  const index_t group = GENERATE(1, 3), dim = 8, value_dim = 6, tokens = 70, again = 83, rows = 11;
  auto kv = fixtures::random_cache(
      tokens, fixtures::layer_terms().shape(1, group, dim, tokens + again, {}, value_dim));
  const auto output = fixtures::normal(rows * 2 * group * value_dim);  // of two KV heads
  auto norms = fixtures::normal(again);
  for (float& x : norms) {
    x = 0.5F + std::abs(x);
  }
  const index_t stride = 2 * group * value_dim, first = group * value_dim;
  const kvzip policy{.plus = true, .output = {output.data() + first, rows, stride}};
  auto state = fixtures::make_state(policy, kv);
  const auto keys = fixtures::normal(again * dim), values = fixtures::normal(again * value_dim);
  const fixtures::queries second(again, group, dim, 2);
  auto queries = second.view();
  const oracle::head prompt = fixtures::to_oracle(kv.head(0));
  kv.append(0, keys, values);
  CHECK_THROWS_WITH(kvmeld::observe(policy, kv.head(0), state[0], queries),
                    Catch::Contains("kvzip: plus=1: expected the queries' hidden_norm, got none"));
  queries.hidden_norm = norms.data();
  CHECK_THROWS_WITH(kvmeld::observe(kvzip{.plus = true}, kv.head(0), state[0], queries),
                    Catch::Contains("kvzip: plus=1: expected the output projection, got none"));
  kvmeld::observe(policy, kv.head(0), state[0], queries);
  state[0].truncate(tokens);

  oracle::tensor projection;
  for (index_t g = 0; g < group; ++g) {
    projection.emplace_back();
    for (index_t r = 0; r < rows; ++r) {
      const float* const row = output.data() + r * stride + first + g * value_dim;
      projection.back().emplace_back(row, row + value_dim);
    }
  }
  is_the_oracles(
      state[0].column(0),
      oracle::kvzip::scores(prompt, fixtures::to_mat(keys.data(), again, dim), second.tensor(),
                            projection, oracle::vec(norms.begin(), norms.end())));
}

TEST_CASE("a prompt that is read again in parts has the largest score of all of them", "[kvzip]") {
  const index_t dim = 8, tokens = 40;
  auto kv = fixtures::random_cache(tokens, dim, 2, tokens + 30);
  const kvzip policy;
  auto both = fixtures::make_state(policy, kv), one = both, other = both;
  const reading a(25, dim, 2, 2), b(30, dim, 2, 2);
  a.observe(policy, kv, one);
  b.observe(policy, kv, other);
  a.observe(policy, kv, both);
  b.observe(policy, kv, both);
  for (std::size_t j = 0; j < at(tokens); ++j) {
    CHECK(both[0].column(0)[j] == std::max(one[0].column(0)[j], other[0].column(0)[j]));
  }
  CHECK(both[0].observed() == 55);
}

TEST_CASE("what one repeated token looks up is kept, however little all others look at it",
          "[kvzip]") {
  const index_t dim = 16, tokens = 200, fact = 100;
  auto kv = fixtures::random_cache(tokens, dim, 1, 2 * tokens);
  reading second(tokens, dim, 1, 0.1F);
  for (index_t i = 0; i < dim; ++i) {
    second.queries.data[at(std::ptrdiff_t{150} * dim + i)] = 30 * kv.head(0).key(fact)[i];
  }
  const kvzip policy;
  auto state = fixtures::make_state(policy, kv);
  second.observe(policy, kv, state);
  fixtures::compress(policy, kv, state, kvmeld::no_queries,
                     budget{kvmeld::declared(policy).min_budget()});
  CHECK(kv.head(0).position(4) == fact);
}

TEST_CASE("kvzip compresses prompts only, and has to have measured", "[errors]") {
  const kvzip policy;
  auto kv = fixtures::random_cache(40, 4, 1, 50);
  auto state = fixtures::make_state(policy, kv);
  CHECK_THROWS_WITH(fixtures::compress(policy, kv, state, kvmeld::no_queries, budget{20}),
                    Catch::Contains("kvzip"));
  std::vector<float> out(4);
  CHECK_THROWS_WITH(fixtures::step(policy, kv, state,
                                   {fixtures::normal(4), fixtures::normal(4), fixtures::normal(4)},
                                   budget{41}, out),
                    Catch::Contains("expected a policy that decodes"));
  CHECK_THROWS_WITH(
      fixtures::compress(policy, kv, state, fixtures::queries(40, 1, 4).view(), budget{4}),
      Catch::Contains("expected a budget of at least 5 slots"));
}

TEST_CASE("kvzip+ scores values in 4 bits, which are held rotated, as the floats they stand for",
          "[q4_0]") {
  const index_t dim = 64, tokens = 40, rows = 3;
  const kvmeld::attention_spec spec{.kv_heads = 1, .key_dim = dim};
  kvmeld::cache held(spec, {.capacity = tokens, .values = kvmeld::storage::q4_0});
  held.append(held.heads(0, 0), fixtures::normal(tokens * dim), fixtures::normal(tokens * dim),
              tokens);
  kvmeld::cache floats(spec, {.capacity = tokens});
  kvmeld::detail::copy_slots(held.head(0), floats.head(0));
  auto output = fixtures::normal(rows * dim);
  for (index_t i = 0; i < rows * dim; ++i) {  // a few of a value's numbers count
    output[static_cast<std::size_t>(i)] *= i % dim < 3 ? 1.0F : 0.0F;
  }
  const kvzip policy{.plus = true, .output = {output.data(), rows, dim}};
  const std::vector<float> norms(tokens, 1.0F);
  const fixtures::queries asked(tokens, 1, dim);
  auto queries = asked.view();
  queries.hidden_norm = norms.data();
  std::vector<double> scores[2];
  for (auto* const kv : {&held, &floats}) {
    auto state = make_head_state(policy, kv->head(0));
    kvmeld::observe(policy, kv->head(0), state, queries);
    scores[kv == &held ? 0 : 1].assign(state.column(0).begin(), state.column(0).end());
  }
  is_the_oracles(std::vector<float>(scores[0].begin(), scores[0].end()), scores[1]);
}

}  // namespace policies_kvzip_test
