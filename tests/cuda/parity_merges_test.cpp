// SPDX-License-Identifier: MIT
// Policies that merge by similarity are the library's on the device too: whole prompts, and steps.
#include <catch2/catch.hpp>

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/ems.cuh"
#include "kvmeld/cuda/policies/keepkv.cuh"
#include "kvmeld/cuda/policies/kvmerger.cuh"

namespace kvmeld::cuda {
namespace parity_merges_test {

TEST_CASE("compress: d2o") { check_policy_once(d2o{}, 24, 101); }
TEST_CASE("compress: keepkv") {
  // Merged keys are no longer exact: ties in steps on codes would go by rounding.
  check_policy_once(keepkv{.similarity = 0.4F}, 24, 111, false);
  const keepkv evicts_first{.sinks = 0, .similarity = 0.6F, .window = 8, .merge_first = false};
  const cache_case c{.heads = 2, .dim = 32, .group = 2};
  check_compress<float>(evicts_first, c, {.slots = 24}, 1e-5, 121);
  check_compress<float>(evicts_first, c,
                        {.queries = 20, .slots = 24, .shuffled = true, .positions = true}, 1e-5,
                        122);
  check_compress<float>(evicts_first, c, {.slots = 24, .random = true, .steps = 4}, 1e-5, 123);
  // A second prompt's estimates begin anew.
  check_compress<float>(evicts_first, c, {.slots = 24, .random = true, .again = 20}, 1e-5, 124);
}
TEST_CASE("compress: kvmerger") {
  check_policy_once(kvmerger{}, 24, 131);
  check_policy(
      kvmerger{
          .joins = kvmerger::mode::threshold, .epsilon = 0.3F, .sigma = 5, .scale_values = false},
      40, 141);
  check_policy(kvmerger{.recent = 0, .heavy = 0.5F, .sinks = 0, .gaps_break = false}, 16, 151);
  check_policy(kvmerger{.scale_values = true}, 24, 181);
  const kvmerger shared = kvmerger{}.sharing(24);
  CHECK_THROWS_WITH(device_policy<kvmerger>::rule(shared, {}),
                    Catch::Contains("cuda kvmerger: expected heads with budgets of their own"));
}

TEST_CASE("soft caps and sinks: merges by similarity") {
  const auto check = [](const auto& policy, std::uint64_t seed) {
    const cache_case c{.capacity = 33, .dim = 32, .group = 2, .soft_cap = 1.5F, .sinks = true};
    check_compress<float>(policy, c, {.slots = 24, .random = true, .steps = 2}, 1e-5, seed);
    check_steps<Eigen::half>(policy, c, 30, {32}, 8, data::integers, 1e-3, seed + 1);
  };
  check(d2o{}, 301);
  check(keepkv{.similarity = 0.4F}, 303);
  check(kvmerger{}, 305);
}

TEST_CASE("compress: keepkv walks several tiles of walkers") {
  check_compress<Eigen::half>(keepkv{.similarity = 0.6F}, {.heads = 1, .dim = 8, .group = 1},
                              {.length = 500, .queries = 10, .slots = 100, .random = true}, 1e-3,
                              93);
}

TEST_CASE("compress: rows and runs of hundreds of slots") {
  const cache_case c{.heads = 1, .dim = 8, .group = 1};
  const prompt_case many{
      .length = 700, .queries = 10, .slots = 24, .random = true, .rounding = 1e-5F};
  check_compress<float>(d2o{}, c, many, 1e-5, 161);
  check_compress<float>(kvmerger{.gaps_break = false}, c, many, 1e-5, 162);
  check_compress<float>(kvmerger{}, {.heads = 2, .dim = 40, .group = 1}, many, 1e-5, 163);
  check_compress<float>(keepkv{.similarity = 0.2F}, c, many, 1e-4, 164);
}

// 64 heads: a warp weighs several rows.
TEST_CASE("compress: rows of many heads") {
  const cache_case c{.heads = 64, .dim = 8, .group = 1};
  const prompt_case some{.length = 80, .queries = 10, .slots = 40, .random = true};
  check_compress<float>(d2o{}, c, some, 1e-5, 171);
  check_compress<float>(kvmerger{}, c, some, 1e-5, 172);
}

TEST_CASE("step: d2o") { check_decode(d2o{}, 24, 91); }
TEST_CASE("step: kvmerger") { check_decode(kvmerger{}, 24, 111); }
TEST_CASE("step: keepkv") { check_decode(keepkv{.similarity = 0.3F}, 24, 101); }
TEST_CASE("step: keepkv, more slots and query heads than a block asks for at once") {
  const keepkv policy{.similarity = 0.3F};
  check_steps<float>(policy, {.heads = 1, .capacity = 1101, .dim = 8, .group = 5}, 1100, {1100}, 3,
                     data::integers, 1e-5, 103);
  check_steps<Eigen::half>(policy, {.heads = 2, .capacity = 251, .dim = 32, .group = 7}, 250, {250},
                           6, data::integers, 1e-3, 104);
}

template <class Policy>
void make_rule(const Policy& p) {
  static_cast<void>(device_policy<Policy>::rule(p, {.key_dim = 8}));
}

TEST_CASE("policies' modes without kernels are refused", "[errors]") {
  CHECK_NOTHROW(make_rule(d2o{}));
  CHECK_THROWS_WITH(make_rule(d2o{.counts = true}),
                    Catch::Contains("cuda d2o: expected mass=0, got 1"));
  CHECK_THROWS_WITH(make_rule(d2o{.weights = d2o::weighting::code}),
                    Catch::Contains("cuda d2o: expected the paper's weights, got the code's"));
  CHECK_NOTHROW(make_rule(keepkv{}));
  CHECK_THROWS_WITH(make_rule(keepkv{.variant = keepkv::mode::code, .distance_weight = 1.2F}),
                    Catch::Contains("cuda keepkv: expected the paper's mode, got the code's"));
  CHECK_NOTHROW(make_rule(ems{}));
  CHECK_THROWS_WITH(make_rule(ems{.with_position = false, .merge_unrotated = true}),
                    Catch::Contains("cuda ems: expected merge_unrotated=0, got 1"));
}

}  // namespace parity_merges_test
}  // namespace kvmeld::cuda
