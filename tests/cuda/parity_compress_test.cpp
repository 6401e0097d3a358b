// SPDX-License-Identifier: MIT
// The device's `compress` is the library's: on prompts whose attention is exact, the same plans,
// ties included, with the same weights; on random ones nearly always. Then decoding goes on.
#include <catch2/catch.hpp>

#include "cuda/prompt_parity.hpp"
#include "kvmeld/cuda/policies/full_cache.cuh"
#include "kvmeld/cuda/policies/h2o.cuh"
#include "kvmeld/cuda/policies/snapkv.cuh"
#include "kvmeld/cuda/policies/streaming_llm.cuh"
#include "kvmeld/cuda/policies/tova.cuh"
#include "kvmeld/cuda/policies/zsmerge.cuh"

namespace kvmeld::cuda {
namespace parity_compress_test {

TEST_CASE("compress: streaming_llm") { check_policy_once(streaming_llm{}, 24, 1); }
TEST_CASE("compress: full_cache") { check_compress<float>(full_cache{}, {.dim = 8}, {}, 0, 11); }
TEST_CASE("compress: h2o") {
  check_policy_once(h2o{}, 32, 21);
  check_policy(h2o{.recent = 0.25F, .sinks = 0, .combine = group_combine::max}, 19, 31);
}
TEST_CASE("compress: tova") {
  check_policy_once(tova{}, 24, 101);
  check_policy(tova{.sinks = 0, .combine = group_combine::max}, 19, 111);
}
TEST_CASE("compress: snapkv") {
  check_policy_once(snapkv{.window = 8}, 24, 41);
  check_policy(snapkv{.window = 4, .kernel = 5, .count_border = true}, 24, 51);
}
TEST_CASE("compress: zsmerge") {
  check_policy_once(zsmerge{}, 24, 61);
  check_compress<float>(zsmerge{.residual = 3}, {.heads = 2, .dim = 32},  // none is evicted
                        {.length = 24, .queries = 20, .slots = 24, .steps = 3}, 1e-5, 69);
  check_policy(zsmerge{.residual = 3, .prompt = zsmerge::prompt_mode::nearest}, 24, 71);
  check_policy(zsmerge{.residual = 5, .sinks = 0, .new_token_competes = false}, 24, 81);
}

TEST_CASE("compress: soft caps and sinks") {
  const auto check = [](const auto& policy, std::uint64_t seed) {
    const cache_case c{.dim = 40, .group = 2, .soft_cap = 1.5F, .sinks = true};
    check_compress<float>(policy, c, {.slots = 24, .random = true, .steps = 2}, 1e-5, seed);
    check_compress<Eigen::half>(policy, c, {.slots = 24, .random = true}, 1e-3, seed + 1);
  };
  check(h2o{}, 201);
  check(tova{.combine = group_combine::max}, 203);
  check(snapkv{.window = 8}, 205);
  check(zsmerge{}, 207);
}

TEST_CASE("compress: rows in q8_0 and fp8") {
  const auto check = [](const auto& policy, std::uint64_t seed) {
    check_compress<kvmeld::q8_0>(policy, {.heads = 2, .dim = 32, .group = 2},
                                 {.slots = 24, .shuffled = true, .steps = 4}, 1e-5, seed);
    check_compress<kvmeld::q8_0>(policy, {.heads = 1, .dim = 72, .paged = true, .odd = 6},
                                 {.slots = 24, .random = true, .steps = 2}, 1e-5, seed + 1);
  };
  policy_calls<h2o, fp8_e4m3<float>>::check_compress(
      {}, {.heads = 2, .dim = 32, .group = 2, .paged = true}, {.slots = 24, .steps = 4}, 1e-5, 97);
  check(h2o{}, 93);
  check(snapkv{.window = 8}, 95);
}

TEST_CASE("compress takes prompts of several blocks") {
  check_compress<Eigen::half>(zsmerge{.residual = 4}, {.heads = 1, .dim = 8, .group = 1},
                              {.length = 2100, .queries = 20, .slots = 600, .random = true}, 1e-3,
                              91);
  check_compress<float>(
      snapkv{}, {.heads = 1, .dim = 8, .group = 1},
      {.length = 1500, .queries = 40, .slots = 600, .random = true, .shuffled = true}, 1e-5, 92);
}

TEST_CASE("compress refuses what it cannot do") {
  device_cache<float> kv({.capacity = 9, .dim = 32}, {3, 3}, 1, {slot_reduce::sum});
  const auto compress_to = [&](const budget& b) {
    policy_calls<h2o, float>::compress({}, kv.view(), kv.state, {}, b, {}, order());
  };
  CHECK_THROWS_WITH(compress_to({4}),
                    Catch::Contains("expected h2o with a target of 8 to 9 slots, got 4"));
  CHECK_THROWS_WITH(compress_to({8}), Catch::Contains("cuda compress: expected a workspace of"));
}

}  // namespace parity_compress_test
}  // namespace kvmeld::cuda
