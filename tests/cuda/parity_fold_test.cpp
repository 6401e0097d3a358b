// SPDX-License-Identifier: MIT
// fold on the device is the library's: queries remembered, leverage, pairs, rows and their mass.
// Numbers here are seldom exact, so nothing ties but equal keys.
#include <catch2/catch.hpp>

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"
#include "kvmeld/cuda/policies/fold.cuh"

namespace kvmeld::cuda {
namespace parity_fold_test {

TEST_CASE("step: fold") {
  const fold p{.recent = 6, .decode = {.queries = 8}};
  const cache_case c{.heads = 2, .capacity = 30, .dim = 32, .group = 2};
  check_steps<float>(p, c, 20, {24, 27}, 14, data::integers, 1e-5, 201);
  check_steps<float>(p, c, 0, {24, 26}, 30, data::integers, 1e-5, 202);
  check_steps<float>(p, c, 29, {24}, 3, data::integers, 1e-5, 203);  // a whole prompt, no queries
  check_steps<float>(p, c, 24, {24, 29}, 40, data::random, 1e-5, 204);
  check_stream(p, c, {24, 29});
  const cache_case paged{.heads = 1, .capacity = 30, .dim = 40, .group = 4, .paged = true};
  check_steps<Eigen::half>(p, paged, 22, {24, 27}, 8, data::integers, 1e-3, 205);
  check_steps<Eigen::bfloat16>(p, paged, 22, {24, 27}, 8, data::integers, 1.6e-2, 206);
}

TEST_CASE("step: fold by scores from an empty cache, where all but the clusters stands out") {
  fold p{.recent = 4, .decode = {.queries = 8}};
  p.pins = fold::pin_rule::scores, p.clusters = 4, p.prompt_recent = 3;
  const cache_case c{.heads = 2, .capacity = 30, .dim = 32, .group = 2};
  check_steps<float>(p, c, 0, {24, 26}, 40, data::integers, 1e-5, 213);
  check_steps<float>(p, c, 20, {24, 29}, 30, data::random, 1e-5, 214);  // a prompt without scores
  check_steps<Eigen::half>(p, c, 0, {24, 27}, 34, data::integers, 1e-3, 215);
}

TEST_CASE("step: fold of keys in few directions, whose costs tie") {
  const fold one{.recent = 6, .decode = {.queries = 8}};
  check_steps<float>(one, {.heads = 2, .capacity = 30, .dim = 1}, 20, {24, 29}, 20, data::integers,
                     1e-5, 207);
  const fold p{.sinks = 0, .recent = 3, .share = 0.25F, .decode = {.queries = 8}};
  check_steps<float>(p, {.heads = 2, .capacity = 30, .dim = 2, .group = 2}, 20, {20, 29}, 30,
                     data::integers, 1e-5, 209);
}

TEST_CASE("step: fold with other ropes, strides and shapes") {
  const rotary llama = rotary::interleaved(500'000).llama3({.original_context = 64});
  const fold p{.sinks = 0,
               .recent = 3,
               .share = 0.25F,
               .decode = {.ahead = {.fade = std::numeric_limits<float>::infinity()},
                          .queries = 5,
                          .stride = 1,
                          .period = 3}};
  check_steps<float>(p, {.heads = 2, .capacity = 21, .dim = 33, .rope = &llama}, 16, {16, 19}, 9,
                     data::integers, 1e-5, 211);
  check_steps<Eigen::half>(p, {.heads = 1, .capacity = 21, .dim = 160, .rope = &llama}, 16,
                           {16, 19}, 4, data::integers, 1e-3, 212);
  check_steps<float>(p, {.heads = 1, .capacity = 21, .dim = 256, .rope = &llama}, 16, {16, 19}, 4,
                     data::integers, 1e-5, 213);
  check_steps<float>(fold{}, {.heads = 2, .capacity = 290, .dim = 8}, 284, {256, 286}, 6,
                     data::integers, 1e-5, 214);  // several tiles
}

TEST_CASE("compress: fold") {
  const fold p{.recent = 6, .decode = {.queries = 8}};
  const cache_case c{.heads = 2, .dim = 32, .group = 2};
  prompt_case what{.queries = 40, .slots = 24, .random = true, .rounding = 2e-5F, .steps = 6};
  check_compress<float>(p, c, what, 1e-5, 221);
  what.shuffled = true, what.positions = true, what.steps = 0;
  check_compress<float>(p, c, what, 1e-5, 222);
  const cache_case paged{.heads = 1, .dim = 40, .group = 4, .paged = true};
  check_compress<Eigen::half>(p, paged, what, 1e-3, 223);
  check_compress<Eigen::bfloat16>(p, paged, what, 8e-3, 224);
  what.queries = 5;  // fewer than are remembered, and than there are rows
  check_compress<float>(p, {.heads = 9, .dim = 8}, what, 1e-5, 225);
  what.queries = 0;
  check_compress<float>(p, c, what, 1e-5, 226);
}

TEST_CASE("compress and step: fold that remembers no query") {
  // Masses are counts then, so that two slots cost the same into each other: integers, whose
  // products are exact, and one plan, after which log-mass is not.
  const fold p{.recent = 6, .decode = {.queries = 0}};
  const cache_case c{.heads = 2, .capacity = 30, .dim = 32, .group = 2};
  check_steps<float>(p, c, 20, {24, 27}, 8, data::integers, 1e-5, 227);
  check_compress<float>(p, {.heads = 2, .dim = 32, .group = 2},
                        {.queries = 40, .slots = 24, .random = true, .rounding = 2e-5F}, 1e-5, 228);
}

TEST_CASE("compress: fold with other parameters and shapes") {
  const rotary adjacent = rotary::interleaved(10'000);
  const fold p{.sinks = 0,
               .recent = 3,
               .share = 0.25F,
               .prompt = {.pool = 1, .outlier = 0, .rounds = 1, .floor = 0, .ridge = 0}};
  check_compress<float>(
      p, {.heads = 1, .dim = 33, .rope = &adjacent},
      {.length = 50, .queries = 20, .slots = 16, .random = true, .rounding = 2e-5F}, 1e-5, 231);
  check_compress<Eigen::half>(
      p, {.heads = 1, .dim = 160, .rope = &adjacent},
      {.length = 50, .queries = 20, .slots = 16, .random = true, .rounding = 2e-5F}, 1e-3, 232);
  check_compress<float>(
      fold{}, {.heads = 1, .dim = 8},
      {.length = 700, .queries = 70, .slots = 200, .random = true, .rounding = 2e-5F}, 1e-5, 233);
}

/// Four sinks have all but e^-gap of every query's attention. What outputs lack is then what
/// rounding takes; over the others' mass that is a value of any size. The largest that is made.
template <class Scalar>
double largest_value(float gap, std::uint64_t seed) {
  const fold p{.recent = 6, .decode = {.queries = 8}};
  const cache_case c{.heads = 1, .capacity = 300, .dim = 32};
  device_cache<Scalar> kv(c, {c.capacity}, seed, {slot_reduce::sum},
                          static_cast<index_t>(kvmeld::declared(p).memory(c.dim, 1, c.capacity)));
  kv.state.initial[0] = kvmeld::declared(p).slot_stats()[0].initial;
  emulator::chance random{seed};
  const auto number = [&] { return static_cast<float>(random.below(2001)) / 1000 - 1; };
  for (index_t s = 0; s < c.capacity; ++s) {
    for (index_t i = 0; i < c.dim; ++i) {
      kv.key(0, s)[i] = from_float<Scalar>(i == 0 && s < 4 ? gap / c.scale : number());
      kv.value(0, s)[i] = from_float<Scalar>(number());
    }
  }
  constexpr index_t count = 70;
  device_buffer<Scalar> queries(static_cast<std::size_t>(count * c.dim));
  for (index_t i = 0; i < count * c.dim; ++i) {
    queries[i] = from_float<Scalar>(i % c.dim == 0 ? 1.0F : 0.1F * number());
  }
  device_buffer<unsigned char> memory(workspace_bytes(p, kv.view(), count));
  policy_calls<fold, Scalar>::compress(p, kv.view(), kv.state,
                                       {queries.data(), count, c.dim, c.dim, c.dim}, budget{64},
                                       {memory.data(), memory.size()}, order(seed));
  REQUIRE(kv.length[0] == 64);
  double largest = 0;
  for (index_t s = 0; s < kv.length[0]; ++s) {
    for (index_t i = 0; i < c.dim; ++i) {
      largest = worse(largest, std::abs(double{to_float(kv.value(0, s)[i])}));
    }
  }
  return largest;
}

TEST_CASE("compress: fold fits no values to what rounding takes") {
  for (const float gap : {15.0F, 20.0F, 25.0F, 80.0F}) {
    INFO("logits apart by " << gap);
    CHECK(largest_value<float>(gap, 241) < 2);
    CHECK(largest_value<half>(gap, 242) < 2);
    CHECK(largest_value<bfloat16>(gap, 243) < 2);
  }
}

TEST_CASE("workspace_bytes refuses scores in decode") {
  device_cache<float> kv({.capacity = 40, .dim = 8}, {3, 3}, 1);
  const fold p{.decode = {.rescore = 16}, .pins = fold::pin_rule::scores};
  CHECK_THROWS_WITH(workspace_bytes(p, kv.view(), 1),
                    Catch::Contains("cuda fold: expected rescore=0, got 16"));
}

TEST_CASE("step refuses a state without fold's memory") {
  device_cache<float> kv({.capacity = 40, .dim = 8}, {3, 3}, 1, {slot_reduce::sum}, 7);
  std::vector<float> x(16);
  CHECK_THROWS_WITH(
      (policy_calls<fold, float>::step({}, kv.view(), kv.state, x.data(), {x.data(), x.data()},
                                       budget{.slots = 32}, x.data(), {}, order())),
      Catch::Contains("cuda fold: expected a state of " + std::to_string(fold{}.memory(8, 1, 40)) +
                      " floats of memory per head"));
}

}  // namespace parity_fold_test
}  // namespace kvmeld::cuda
