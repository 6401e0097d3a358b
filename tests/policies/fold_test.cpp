// SPDX-License-Identifier: MIT
// fold against its prototypes' numbers, its oracle, and what must hold of any tangent and fit.
#include "kvmeld/policies/fold.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <fstream>

#include "../../examples/evaluate/reference_queries.hpp"
#include "kvmeld/peers.hpp"
#include "oracle/oracle.hpp"
#include "support/agree.hpp"
#include "support/fixtures.hpp"
#include "support/golden.hpp"
#include "support/paths.hpp"

namespace policies_fold_test {

using fixtures::index_t;
using kvmeld::budget;
using kvmeld::fold;

golden::record load(const std::string& name) {
  std::ifstream file(paths::data(name + ".json"));
  REQUIRE(file);
  return golden::record(nlohmann::json::parse(file));
}

std::vector<float> floats(const oracle::mat& rows) {
  std::vector<float> all;
  for (const auto& row : rows) {
    for (const double x : row) {
      all.push_back(static_cast<float>(x));
    }
  }
  return all;
}

/// The slots are those stored, in the order of their positions.
template <class Head>
void same(const Head& head, const golden::record& g, double tolerance) {
  auto h = fixtures::to_oracle(head);
  std::ranges::sort(h.slots, {}, &oracle::slot::position);
  const oracle::mat keys = g.of_head("keys", 0, 1, h.dim),
                    values = g.of_head("values", 0, 1, h.dim);
  const oracle::vec beta = g.of_head("log_mass", 0, 1);
  REQUIRE(h.slots.size() == keys.size());
  for (std::size_t j = 0; j < keys.size(); ++j) {
    INFO("slot " << j);
    CHECK(oracle::difference(h.slots[j].key, keys[j]) < tolerance);
    CHECK(oracle::difference(h.slots[j].value, values[j]) < tolerance);
    CHECK(oracle::difference(h.slots[j].log_mass, beta[j]) < tolerance);
  }
}

/// The prototypes' lookahead.
kvmeld::future_positions even(index_t horizon) {
  return {.horizon = horizon, .fade = std::numeric_limits<float>::infinity()};
}

/// Mean over the queries of the mass that slots have, over the full head's.
double mass_held(const oracle::head& full, const oracle::head& made, const oracle::mat& queries) {
  double held = 0;
  for (const auto& q : queries) {
    const double z = oracle::attend(full, {q}).lse[0];
    held += std::exp(oracle::attend(made, {q}).lse[0] - z);
  }
  return held / static_cast<double>(queries.size());
}

TEST_CASE("fold of a prompt is the prototype's", "[golden]") {
  for (const auto& g : load("fold_prompt").cases()) {
    INFO(g.text("name"));
    const index_t tokens = g.number("prompt"), dim = g.dim(), group = g.number("group");
    fixtures::cache<float> kv{{.heads = 1, .group = group, .dim = dim, .capacity = tokens}};
    kv.append(0, floats(g.of_head("k", 0, 1, dim)), floats(g.of_head("v", 0, 1, dim)));
    fold policy{.sinks = g.number("sinks"),
                .recent = g.number("recent"),
                .recent_share = 1,
                .share = static_cast<float>(g.real("share"))};
    policy.prompt.floor = static_cast<float>(g.real("floor"));
    policy.prompt.pool = 1, policy.leverage_ridge = 0.01F;
    policy.prompt.outlier = 0;  // as the prototype
    policy.prompt.rounds = g.number("rounds");
    policy.prompt.ridge = static_cast<float>(g.real("ridge"));
    auto state = fixtures::make_state(kvmeld::any_policy_or_peer(policy), kv);
    const auto q = floats(g.of_head("q", 0, 1, dim));
    const auto reference =
        evaluate::lookahead(kv, kvmeld::prompt_queries(q.data(), tokens, 1, group, dim),
                            {.count = g.number("queries"), .ahead = even(g.number("horizon"))});
    fixtures::compress(kvmeld::any_policy_or_peer(policy), kv, state, reference.view(),
                       budget{g.number("budget")});
    same(kv.head(0), g, 1e-4);
  }
}

TEST_CASE("fold in decode is the prototype's", "[golden]") {
  for (const auto& g : load("fold_stream").cases()) {
    INFO(g.text("name"));
    const index_t dim = g.dim(), group = g.number("group"), slots = g.number("budget");
    fixtures::cache<float> kv{{.heads = 1, .group = group, .dim = dim, .capacity = slots + 1}};
    fold policy{.sinks = g.number("sinks"),
                .recent = g.number("recent"),
                .recent_share = 1,
                .share = static_cast<float>(g.real("share")),
                .leverage_ridge = static_cast<float>(g.real("leverage_ridge"))};
    policy.decode = {.ahead = even(g.number("horizon")),
                     .queries = g.number("window"),
                     .stride = g.number("stride"),
                     .period = g.number("period")};
    auto state = fixtures::make_state(kvmeld::any_policy_or_peer(policy), kv);
    const auto q = floats(g.of_head("q", 0, 1, dim)), k = floats(g.of_head("k", 0, 1, dim)),
               v = floats(g.of_head("v", 0, 1, dim));
    const auto at = [](const std::vector<float>& x, index_t t, index_t n) {
      return std::span(x).subspan(static_cast<std::size_t>(t * n), static_cast<std::size_t>(n));
    };
    std::vector<float> out(static_cast<std::size_t>(group * dim));
    int next = 0, caches = 0;
    for (index_t t = 0; t < g.number("tokens"); ++t) {
      INFO("token " << t);
      fixtures::step(kvmeld::any_policy_or_peer(policy), kv, state,
                     {at(q, t, group * dim), at(k, t, dim), at(v, t, dim)},
                     kvmeld::budget_within(policy, slots), out);
      const golden::record expected = g.step(next);
      if (expected.number("at") != t) {
        continue;
      }
      ++next;
      REQUIRE(kv.head(0).length() == expected.number("length"));
      CHECK(oracle::difference(fixtures::to_mat(out.data(), group, dim),
                               expected.of_head("output", 0, 1, dim)) < 1e-4);
      if (expected.has("keys")) {
        ++caches;
        // Slots are in another order: a fold keeps them where they are, and so does the prototype.
        same(kv.head(0), expected, 1e-4);
      }
    }
    CHECK(caches == 2);
    CHECK(next == g.steps());
  }
}

TEST_CASE("fold is its oracle: chunks, decode, groups, odd dimensions", "[oracle]") {
  const index_t dim = GENERATE(1, 7, 16), group = GENERATE(1, 3);
  const fixtures::layer_terms terms = GENERATE(from_range(fixtures::merged_terms));
  const index_t slots = 40, chunk = 48;
  INFO(terms.name << ", dim " << dim << ", group " << group);
  fold policy;
  policy.decode.period = 4;
  const oracle::fold o{.sinks = 4,
                       .recent = 10,
                       .outliers = 0.5,
                       .pool = 5,
                       .leverage_ridge = 1,
                       .outlying = 1.6,
                       .period = 4};
  const index_t of_values = GENERATE(0, 5) + dim;
  fixtures::cache<float> kv{
      terms.shape(1, group, dim, slots + chunk, fixtures::default_rope, of_values)};
  auto state = fixtures::make_state(kvmeld::any_policy_or_peer(policy), kv);
  oracle::head expected = fixtures::to_oracle(kv.head(0));
  for (int round = 0; round < 2; ++round) {
    auto k = fixtures::normal(chunk * dim);
    const auto v = fixtures::normal(chunk * of_values);
    for (index_t i = 12 * dim; i < 17 * dim; ++i) {  // outliers, which few heads of noise have
      k[static_cast<std::size_t>(i)] *= 3;
    }
    kv.append(0, k, v);
    for (index_t t = 0; t < chunk; ++t) {
      append(expected, fixtures::to_mat(&k[static_cast<std::size_t>(t * dim)], 1, dim)[0],
             fixtures::to_mat(&v[static_cast<std::size_t>(t * of_values)], 1, of_values)[0],
             round * chunk + t);
    }
    const fixtures::queries queries(chunk, group, dim);
    const auto reference = evaluate::lookahead(kv, queries.view());
    fixtures::compress(kvmeld::any_policy_or_peer(policy), kv, state, reference.view(),
                       budget{slots});
    o.prompt(expected, queries.tensor(), {}, slots);
    REQUIRE(oracle::set_difference(fixtures::to_oracle(kv.head(0)), expected) < 1e-3);
  }
}

TEST_CASE("what stands out of a prompt keeps its bytes, and where nothing does, few slots do",
          "[fold]") {
  const index_t dim = 16, tokens = 200, slots = 60, from = 70, until = 75;
  const bool odd = GENERATE(false, true);
  auto kv = fixtures::random_cache(tokens, dim, 1);
  auto head = kv.head(0);
  for (index_t s = from; odd && s < until; ++s) {
    for (index_t i = 0; i < dim; ++i) {
      head.key(s)[i] *= 4;
    }
  }
  const oracle::head before = fixtures::to_oracle(head);
  const fold policy;
  auto state = fixtures::make_state(kvmeld::any_policy_or_peer(policy), kv);
  const fixtures::queries queries(100, 1, dim);
  const auto reference = evaluate::lookahead(kv, queries.view());
  fixtures::compress(kvmeld::any_policy_or_peer(policy), kv, state, reference.view(),
                     budget{slots});
  index_t same = 0, outlying = 0;
  for (const oracle::slot& s : fixtures::to_oracle(kv.head(0)).slots) {
    const oracle::slot& was = before.slots[static_cast<std::size_t>(s.position)];
    const bool kept = s.key == was.key && s.value == was.value;
    same += kept ? 1 : 0;
    outlying += kept && s.position >= from && s.position < until ? 1 : 0;
  }
  CHECK(outlying == (odd ? until - from : 0));
  const index_t protected_ones = 4 + 15;  // sinks, and a quarter of the slots
  CHECK(same < protected_ones + (odd ? 12 : 4));
}

TEST_CASE("fold keeps the mass of what it folds, in the mean over its queries", "[fold]") {
  const fold policy;
  auto kv = fixtures::random_cache(200, 16, 2);
  auto state = fixtures::make_state(kvmeld::any_policy_or_peer(policy), kv);
  const oracle::head full = fixtures::to_oracle(kv.head(0));
  const fixtures::queries queries(100, 2, 16);
  const auto reference = evaluate::lookahead(kv, queries.view());
  fixtures::compress(kvmeld::any_policy_or_peer(policy), kv, state, reference.view(), budget{50});
  oracle::mat rows;
  const auto view = reference.view();
  for (index_t i = 0; i < view.count; ++i) {
    for (index_t g = 0; g < 2; ++g) {
      rows.push_back(fixtures::to_mat(view.at(g, i), 1, 16)[0]);
    }
  }
  CHECK(mass_held(full, fixtures::to_oracle(kv.head(0)), rows) == Approx(1).margin(1e-4));
}

TEST_CASE("the tangent is exact where it was measured, and second order around it", "[fold]") {
  // One remembered query: the mass of the folded slots is matched at it, and off it the error of
  // the log-mass falls with the square of the distance: slope 2 in log-log.
  const index_t dim = 8;
  fold policy{.sinks = 0, .recent = 0, .share = 0};
  policy.prompt.ridge = 0;
  auto kv = fixtures::random_cache(30, dim, 1);
  auto state = fixtures::make_state(kvmeld::any_policy_or_peer(policy), kv);
  const oracle::head full = fixtures::to_oracle(kv.head(0));
  const fixtures::queries one(1, 1, dim);
  const index_t position = 30;
  auto view = one.view();
  view.position = &position;
  fixtures::compress(kvmeld::any_policy_or_peer(policy), kv, state, view, budget{3});
  const oracle::head made = fixtures::to_oracle(kv.head(0));
  const oracle::vec q = fixtures::to_mat(view.at(0, 0), 1, dim)[0];
  const auto error = [&](double step) {
    double sum = 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(dim); ++i) {
      for (const double sign : {1.0, -1.0}) {
        oracle::vec moved = q;
        moved[i] += sign * step;
        sum +=
            std::abs(oracle::attend(made, {moved}).lse[0] - oracle::attend(full, {moved}).lse[0]);
      }
    }
    return sum;
  };
  CHECK(error(0) < 1e-5);
  const double slope = std::log2(error(0.4) / error(0.2));
  CHECK(slope > 1.8);
  CHECK(slope < 2.2);
  CHECK(oracle::difference(oracle::attend(made, {q}).output, oracle::attend(full, {q}).output) <
        1e-3);
}

}  // namespace policies_fold_test
