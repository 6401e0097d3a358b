// Every policy against its oracle: a prompt, then decode steps, slots compared as sets.
#include <catch2/catch.hpp>

#include "support/fixtures.hpp"
#include "support/policies.hpp"

using fixtures::index_t;
using kvfold::budget;

namespace {

struct setting {
  index_t tokens, dim, group, target, steps;
  index_t trigger = 0;
};

/// Runs both sides on the same random prompt and steps; slots, log-masses and outputs must agree.
template <class Scalar = float, class Policy, class Oracle>
void agree(const Policy& policy, const Oracle& oracle_policy, const setting& s,
           double tolerance = 1e-5) {
  INFO(policy.name() << ": " << s.tokens << " tokens of " << s.dim << ", group " << s.group
                     << ", target " << s.target << ", trigger " << s.trigger);
  auto kv = fixtures::random_cache<Scalar>(s.tokens, s.dim, s.group, s.tokens + s.steps + 1);
  auto state = kvfold::make_state(policy, kv);
  oracle::head expected = fixtures::to_oracle(kv.head(0));
  const fixtures::queries queries(s.tokens, s.group, s.dim);
  kvfold::compress(policy, kv, state, queries.view(), budget{s.target});
  oracle_policy.prompt(expected, queries.tensor(), {}, s.target);
  REQUIRE(oracle::set_difference(fixtures::to_oracle(kv.head(0)), expected) < tolerance);
  std::vector<float> out(static_cast<std::size_t>(s.group * s.dim));
  for (index_t t = 0; t < s.steps; ++t) {
    INFO("step " << t);
    const auto q = fixtures::normal(s.group * s.dim);
    const auto k = fixtures::normal<Scalar>(s.dim), v = fixtures::normal<Scalar>(s.dim);
    const std::vector<float> kf(k.begin(), k.end()), vf(v.begin(), v.end());
    kvfold::step(policy, kv, state, q, kf, vf, budget{s.target, s.trigger}, out);
    const auto o =
        oracle_policy.step(expected, fixtures::to_mat(q.data(), s.group, s.dim),
                           fixtures::to_mat(kf.data(), 1, s.dim)[0],
                           fixtures::to_mat(vf.data(), 1, s.dim)[0], s.target, s.trigger);
    REQUIRE(oracle::difference(fixtures::to_mat(out.data(), s.group, s.dim), o) < tolerance);
    REQUIRE(oracle::set_difference(fixtures::to_oracle(kv.head(0)), expected) < tolerance);
  }
}

const setting settings[] = {{100, 8, 1, 40, 60},     {100, 33, 2, 41, 60}, {257, 16, 4, 64, 40},
                            {30, 4, 3, 48, 80},      {1, 5, 1, 24, 100},   {60, 1, 1, 30, 20},
                            {100, 8, 2, 40, 60, 50}, {1, 8, 2, 24, 90, 31}};

}  // namespace

TEST_CASE("full_cache is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    agree(kvfold::full_cache{}, oracle::full_cache{}, s);
  }
}

TEST_CASE("streaming_llm is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    agree(kvfold::streaming_llm{}, oracle::streaming_llm{}, s);
    agree(kvfold::streaming_llm{.sinks = 0}, oracle::streaming_llm{.sinks = 0}, s);
  }
}

TEST_CASE("h2o is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    agree(kvfold::h2o{}, oracle::h2o{}, s);
    agree(kvfold::h2o{.recent = 0.25F, .sinks = 0}, oracle::h2o{.recent = 0.25, .sinks = 0}, s);
  }
}

TEST_CASE("snapkv is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    for (const bool border : {false, true}) {
      agree(kvfold::snapkv{.window = 8, .sinks = 0, .count_border = border},
            oracle::snapkv{.window = 8, .count_border = border, .pool_window = true}, s);
      agree(kvfold::snapkv{.window = 5, .sinks = 0, .kernel = 1, .count_border = border},
            oracle::snapkv{.window = 5, .kernel = 1, .count_border = border, .pool_window = true},
            s);
    }
  }
}

TEST_CASE("zsmerge is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    for (const bool competes : {true, false}) {
      for (const bool sum : {true, false}) {
        for (const bool chunked : {true, false}) {
          kvfold::zsmerge policy{
              .proximity = 0.2F, .residual = 3, .sinks = 0, .newcomer_competes = competes};
          policy.merged_score = sum ? kvfold::column_fold::sum : kvfold::column_fold::max;
          policy.prompt = chunked ? kvfold::zsmerge::prompt_mode::chunked
                                  : kvfold::zsmerge::prompt_mode::nearest;
          oracle::zsmerge o{.proximity = 0.2, .residual = 3};
          o.newcomer_competes = competes;
          o.score_sum = sum;
          o.nearest = !chunked;
          INFO("competes " << competes << ", sum " << sum << ", chunked " << chunked);
          agree(policy, o, s);
        }
      }
    }
  }
}

TEST_CASE("half and bfloat16 caches choose and merge as the oracle does", "[oracle]") {
  const setting s{100, 16, 2, 40, 20};
  agree<Eigen::half>(kvfold::h2o{}, oracle::h2o{}, s, 1e-3);
  agree<Eigen::bfloat16>(kvfold::h2o{}, oracle::h2o{}, s, 1e-2);
  agree<Eigen::half>(kvfold::snapkv{.window = 8, .sinks = 0},
                     oracle::snapkv{.window = 8, .pool_window = true}, s, 1e-3);
}
