// SPDX-License-Identifier: MIT
// Published traps: values fitted on fewer queries than there are slots, keys turned back by slots.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "support/fixtures.hpp"
#include "support/policies.hpp"

namespace traps_fit_test {

using fixtures::index_t;
using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::budget;

constexpr index_t dim = 8, group = 2;

/// Mean squared error of a made head's outputs on queries, and whether all of it is finite.
double output_error(const oracle::head& full, const oracle::head& made, const oracle::tensor& on) {
  double sum = 0;
  for (const auto& q : on) {
    const auto x = oracle::attend(full, q).output, y = oracle::attend(made, q).output;
    for (std::size_t g = 0; g < x.size(); ++g) {
      for (std::size_t i = 0; i < x[g].size(); ++i) {
        sum += (x[g][i] - y[g][i]) * (x[g][i] - y[g][i]);
      }
    }
  }
  return sum / static_cast<double>(on.size());
}

struct fitted {
  double seen = 0, unseen = 0;  ///< error on the queries of the fit, and on others
  float largest = 0;            ///< value
};

/// Compressed to 40 slots, fitted on fewer queries.
fitted fit_on(const any_policy& policy, fixtures::cache<float> kv, const fixtures::queries& few,
              const fixtures::queries& others) {
  const oracle::head full = fixtures::to_oracle(kv.head(0));
  auto state = fixtures::make_state(policy, kv);
  fixtures::compress(policy, kv, state, few.view(), budget{40});
  const oracle::head made = fixtures::to_oracle(kv.head(0));
  fitted f{output_error(full, made, few.tensor()), output_error(full, made, others.tensor())};
  for (index_t s = 0; s < kv.head(0).length(); ++s) {
    for (index_t i = 0; i < dim; ++i) {
      f.largest = std::max(f.largest, std::abs(kv.head(0).value(s)[i]));
    }
  }
  return f;
}

TEST_CASE("trap: values fitted on too few queries", "[traps]") {
  // Fewer equations than unknowns, and the same equation many times over: without a ridge relative
  // to what was measured the fit is singular, and what it finds is huge.
  const auto pairs = {
      std::pair{any_policy(kvmeld::fold{}), any_policy(kvmeld::fold{.prompt = {.ridge = 0}})},
      std::pair{any_policy(kvmeld::attention_matching{}),
                any_policy(kvmeld::attention_matching{.ridge = 0})}};
  for (const auto& [with, without] : pairs) {
    for (const index_t count : {1, 2, 5, 15}) {
      for (const index_t repeat : {1, 8}) {
        INFO(with.name() << ", " << count << " queries " << repeat << " times");
        fitted sum_with, sum_without;
        for (int round = 0; round < 20; ++round) {
          auto kv = fixtures::random_cache(80, dim, group);
          fixtures::queries few(count, group, dim);
          const auto once = few.data;
          for (index_t r = 1; r < repeat; ++r) {
            few.data.insert(few.data.end(), once.begin(), once.end());
          }
          few.count *= repeat;
          const fixtures::queries others(50, group, dim);
          const fitted a = fit_on(with, kv, few, others), b = fit_on(without, kv, few, others);
          CHECK(std::isfinite(a.seen));
          CHECK(std::isfinite(a.unseen));
          CHECK(a.largest < 10);
          sum_with.seen += a.seen, sum_without.seen += b.seen;
          sum_with.unseen += a.unseen, sum_without.unseen += b.unseen;
        }
        CHECK(sum_with.seen <= sum_without.seen);
        CHECK(sum_with.unseen <= 1.05 * sum_without.unseen);  // one query says next to nothing
      }
    }
  }
}

TEST_CASE("trap: values made of what floats lose", "[traps]") {
  // Sinks have all but e^-gap of the attention. What outputs lack is then what rounding takes, ε of
  // a value; over the others' mass that is a value of any size, for queries yet to come.
  const auto policies = fixtures::every_policy();
  constexpr index_t sinks = 4, tokens = 80, queries = 30, steps = 40;
  constexpr float most = 100;  // kvmerger adds values up; by λ of the trace alone it was 1e29
  const auto numbers_of = [](index_t rows, float first, float scale) {
    auto x = fixtures::normal(rows * dim, scale);
    for (index_t r = 0; r < rows; ++r) {
      x[static_cast<std::size_t>(r * dim)] = first;
    }
    return x;
  };
  for (const auto& example : policies) {
    for (const float gap : {10.0F, 20.0F, 25.0F, 30.0F, 60.0F, 120.0F}) {
      INFO(example.name << ", logits apart by " << gap);
      fixtures::cache<float> kv{{.heads = 1, .group = group, .dim = dim, .capacity = tokens}};
      auto state = fixtures::make_state(example.policy, kv);
      kv.append(0, numbers_of(sinks, gap / kv.head(0).scale(), 1), fixtures::normal(sinks * dim));
      const index_t rest = tokens - sinks;
      kv.append(0, fixtures::normal(rest * dim), fixtures::normal(rest * dim));
      const auto q = numbers_of(queries * group, 1, 0.1F);
      fixtures::compress(example.policy, kv, state,
                         kvmeld::prompt_queries(q.data(), queries, 1, group, dim), budget{40});
      float largest = 0;
      const auto look = [&] {
        for (index_t s = 0; s < kv.head(0).length(); ++s) {
          for (index_t i = 0; i < dim; ++i) {
            const float x = std::abs(kv.head(0).value(s)[i]);
            largest = std::isnan(x) ? std::numeric_limits<float>::infinity() : std::max(largest, x);
          }
        }
      };
      look();
      std::vector<float> out(static_cast<std::size_t>(group * dim));
      for (index_t t = 0; t < steps && kvmeld::declared(example.policy).supports_decode() &&
                          kvmeld::declared(example.policy).evicts();
           ++t) {
        const auto own = numbers_of(group, 1, 0.1F), token = fixtures::normal(dim);
        fixtures::step(example.policy, kv, state, {own, token, token}, budget{40}, std::span(out));
        look();
      }
      CHECK(largest < most);
    }
  }
}

TEST_CASE("trap: keys are un-rotated by slot", "[traps]") {
  // After a compaction slot 4 holds token 64: its key has to be turned back by 64 positions.
  fixtures::cache<float> kv{{.heads = 1, .group = 1, .dim = dim, .capacity = 100}};
  const auto content = fixtures::normal(90 * dim);
  for (index_t t = 0; t < 90; ++t) {
    std::vector<float> k(content.begin() + t * dim, content.begin() + (t + 1) * dim);
    fixtures::default_rope.rotate(kvmeld::row<float>{k.data()}, dim, t);
    kv.append(0, k, fixtures::normal(dim));
  }
  const kvmeld::streaming_llm policy;
  auto state = fixtures::make_state(policy, kv);
  fixtures::compress(policy, kv, state, kvmeld::no_queries, budget{30});
  const auto head = kv.head(0);
  REQUIRE(head.position(4) == 64);
  kvmeld::rotation turn(head.spec().rope, dim);
  for (index_t s = 0; s < 30; ++s) {
    std::vector<float> key(dim);
    kvmeld::score::unrotated_key(head, s, turn, key.data());
    for (index_t i = 0; i < dim; ++i) {
      CHECK(key[static_cast<std::size_t>(i)] ==
            Approx(content[static_cast<std::size_t>(head.position(s) * dim + i)]).margin(1e-5));
    }
  }
}

}  // namespace traps_fit_test
