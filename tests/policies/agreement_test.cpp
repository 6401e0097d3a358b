// SPDX-License-Identifier: MIT
// Every policy against its oracle: a prompt, then decode steps, slots compared as sets.
#include <catch2/catch.hpp>

#include "support/agree.hpp"

namespace agreement_test {

using fixtures::agree;
using fixtures::setting;

const setting settings[] = {{100, 8, 1, 40, 60},
                            {100, 33, 2, 41, 60},
                            {257, 16, 4, 64, 40},
                            {30, 4, 3, 48, 80},
                            {1, 5, 1, 24, 100},
                            {60, 1, 1, 30, 20},
                            {100, 8, 2, 40, 60, 50},
                            {1, 8, 2, 24, 90, 31},
                            {100, 20, 2, 40, 50, 0, 1e-4, fixtures::default_rope, 12},
                            {90, 12, 1, 40, 50, 45, 1e-4, fixtures::default_rope, 20}};

TEST_CASE("full_cache is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    agree(kvmeld::full_cache{}, oracle::full_cache{}, s);
  }
}

TEST_CASE("streaming_llm is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    agree(kvmeld::streaming_llm{}, oracle::streaming_llm{}, s);
    agree(kvmeld::streaming_llm{.sinks = 0}, oracle::streaming_llm{.sinks = 0}, s);
  }
}

TEST_CASE("h2o is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    agree(kvmeld::h2o{}, oracle::h2o{}, s);
    agree(kvmeld::h2o{.recent = 0.25F, .sinks = 0}, oracle::h2o{.recent = 0.25, .sinks = 0}, s);
  }
}

TEST_CASE("snapkv is its oracle", "[oracle]") {
  for (const auto& s : settings) {
    for (const bool border : {false, true}) {
      agree(kvmeld::snapkv{.window = 8, .sinks = 0, .count_border = border},
            oracle::snapkv{.window = 8, .count_border = border, .pool_window = true}, s);
      agree(kvmeld::snapkv{.window = 5, .sinks = 0, .kernel = 1, .count_border = border},
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
          kvmeld::zsmerge policy{
              .proximity = 0.2F, .residual = 3, .sinks = 0, .new_token_competes = competes};
          policy.merged_score = sum ? kvmeld::slot_reduce::sum : kvmeld::slot_reduce::max;
          policy.prompt = chunked ? kvmeld::zsmerge::prompt_mode::chunked
                                  : kvmeld::zsmerge::prompt_mode::nearest;
          oracle::zsmerge o{.proximity = 0.2, .residual = 3};
          o.new_token_competes = competes;
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
  agree<Eigen::half>(kvmeld::h2o{}, oracle::h2o{}, s, 1e-3);
  agree<Eigen::bfloat16>(kvmeld::h2o{}, oracle::h2o{}, s, 1e-2);
  agree<Eigen::half>(kvmeld::snapkv{.window = 8, .sinks = 0},
                     oracle::snapkv{.window = 8, .pool_window = true}, s, 1e-3);
}

}  // namespace agreement_test
