// SPDX-License-Identifier: MIT
// D2O against its oracle, its threshold over a long run, and what is merged and what is dropped.
#include "kvmeld/policies/d2o.hpp"

#include <catch2/catch.hpp>

#include "support/agree.hpp"

namespace d2o_test {

using fixtures::index_t;
using kvmeld::budget;
using kvmeld::d2o;

/// The library's threshold is the oracle's.
const auto same_threshold = [](const kvmeld::head_state& state, const oracle::head& expected,
                               const auto&) {
  const auto memory = state.memory();
  REQUIRE((memory[d2o::has_threshold] != 0) == expected.has_threshold);
  REQUIRE(oracle::difference(static_cast<double>(memory[d2o::threshold]), expected.threshold) <
          1e-5);
};

TEST_CASE("d2o is its oracle", "[oracle]") {
  for (const auto& s : fixtures::settings) {
    fixtures::agree(d2o{}, oracle::d2o{}, s, 1e-5, same_threshold);
    fixtures::agree(d2o{.recent = 0.5F, .sinks = 0, .beta = 0.2F},
                    oracle::d2o{.sinks = 0, .recent = 0.5, .beta = 0.2}, s, 1e-5, same_threshold);
  }
  for (const bool counts : {false, true}) {
    for (const bool code : {false, true}) {
      const auto weights = code ? d2o::weighting::code : d2o::weighting::paper;
      for (const auto& s : fixtures::settings) {
        fixtures::agree(d2o{.beta = 0.5F, .counts = counts, .weights = weights},
                        oracle::d2o{.beta = 0.5, .counts = counts, .code_weights = code}, s, 1e-5,
                        same_threshold);
      }
    }
  }
  const fixtures::setting narrow{100, 16, 2, 40, 20};
  fixtures::agree<Eigen::half>(d2o{}, oracle::d2o{}, narrow, 1e-2);
  fixtures::agree<Eigen::bfloat16>(d2o{}, oracle::d2o{}, narrow, 5e-2);
}

TEST_CASE("the threshold of d2o follows the oracle's over 1000 steps", "[oracle]") {
  const index_t trigger = GENERATE(0, 40);
  const fixtures::setting s{64, 8, 2, 32, 1000, trigger};
  fixtures::agree(d2o{}, oracle::d2o{}, s, 1e-4, same_threshold);
}

TEST_CASE("d2o that counts: copies of a token attend as all of them did", "[d2o]") {
  // All keys are one of three, values too: only copies are alike enough to merge (beta 0 keeps the
  // first threshold, which is 1 less rounding). What the full cache gives, the merged one gives.
  const index_t dim = 4, tokens = 60;
  for (const bool counts : {true, false}) {
    fixtures::cache<float> kv{{.heads = 1, .dim = dim, .capacity = tokens + 1}};
    for (index_t t = 0; t < tokens; ++t) {
      std::vector<float> k(4), v(4);
      k[static_cast<std::size_t>(t % 3)] = 2;
      v[static_cast<std::size_t>(t % 3)] = 3;
      kv.append(0, k, v);
    }
    const auto head = kv.head(0);
    const oracle::head before = fixtures::to_oracle(head);
    auto state = fixtures::make_state(d2o{}, kv);
    const d2o policy{.sinks = 3, .beta = 0, .counts = counts};
    fixtures::compress(policy, kv, state, fixtures::queries(tokens, 1, dim).view(), budget{12});
    REQUIRE(head.length() == 12);
    double all = 0;
    for (index_t s = 0; s < 12; ++s) {
      all += std::exp(double{head.log_mass(s)});
    }
    CHECK(all == Approx(counts ? tokens : 12));
    const oracle::mat probe = fixtures::to_mat(fixtures::normal(dim).data(), 1, dim);
    const auto full = oracle::attend(before, probe), now = attend(fixtures::to_oracle(head), probe);
    CHECK((oracle::difference(full.output, now.output) < 1e-5) == counts);
  }
}

TEST_CASE("d2o merges what is near and drops what is not", "[d2o]") {
  // Keys in the plane; slot 2 is like slot 0, slot 3 is against all that stay.
  fixtures::cache<float> kv{{.heads = 1, .dim = 2, .capacity = 4}};
  kv.append(0, std::vector<float>{1, 0, 0, 1, 3, 0, -1, -1},
            std::vector<float>{1, 1, 2, 2, 3, 3, 4, 4});
  const d2o policy{.recent = 0, .sinks = 2};
  auto state = fixtures::make_state(policy, kv);
  const fixtures::queries queries(4, 1, 2);
  const auto head = kv.head(0);
  kvmeld::observe(policy, head, state[0], queries.view());
  kvmeld::slot_scratch scratch;
  kvmeld::merge_plan plan;
  // The best cosines are 1 and -1/sqrt 2; their mean is the first threshold.
  policy.plan(head, state[0], 2, scratch, plan);
  REQUIRE(plan.rows() == 2);
  CHECK(plan.measured() == Approx((1 - std::sqrt(0.5)) / 2));
  REQUIRE(plan.row(0).size() == 2);
  CHECK(plan.row(0)[1] == kvmeld::merge_source{2, 0.5F, 0.5F});
  CHECK(plan.row(1).size() == 1);
  SECTION("a plan that removes no slot measures nothing") {
    kvmeld::apply(policy, kvmeld::identity(head), head, state[0], scratch);
    CHECK(state[0].memory()[d2o::has_threshold] == 0);
  }
  SECTION("planning keeps the threshold, applying sets it") {
    CHECK(state[0].memory()[d2o::has_threshold] == 0);
    kvmeld::apply(policy, plan, head, state[0], scratch);
    CHECK(state[0].memory()[d2o::threshold] == plan.measured());
  }
}

TEST_CASE("d2o refuses parameters out of range", "[errors]") {
  CHECK_THROWS_WITH(validate(d2o{.recent = 1}),
                    Catch::Contains("expected recent in [0, 1), got 1"));
  CHECK_THROWS_WITH(validate(d2o{.sinks = -1}), Catch::Contains("], got -1"));
  CHECK_THROWS_WITH(validate(d2o{.beta = 1.5F}), Catch::Contains("beta in [0, 1]"));
  CHECK_NOTHROW(validate(d2o{}));
}

}  // namespace d2o_test
