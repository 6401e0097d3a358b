// SPDX-License-Identifier: MIT
// EMS on the device is the library's: entries, plans, and the table token by token, place by place.
#include <catch2/catch.hpp>

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"
#include "kvmeld/cuda/policies/ems.cuh"

namespace kvmeld::cuda {
namespace parity_ems_test {

// Merged keys are no longer exact: ties in steps on codes would go by rounding.
TEST_CASE("compress: ems") {
  check_policy_once(ems{.window = 8, .threshold = 0.1F}, 24, 301, false);
  check_policy(ems{.window = 4, .kernel = 1, .sinks = 0, .gamma = 1.5F, .threshold = -1}, 19, 311,
               false);
}

TEST_CASE("compress: ems a second time, on entries that are shared") {
  ems p{.window = 8, .threshold = 0};
  const cache_case c{.heads = 2, .dim = 8, .group = 2};
  prompt_case what{.queries = 40, .slots = 30, .random = true, .steps = 3, .again = 20};
  check_compress<float>(p, c, what, 1e-5, 331);
  p.combine = group_combine::mean, p.table = 9;
  check_compress<float>(p, c, what, 1e-5, 332);
  p.combine = group_combine::max, p.table = 0, p.gamma = 2;
  what.shuffled = true, what.positions = true;
  check_compress<float>(p, c, what, 1e-5, 333);
  what.steps = 0;
  check_compress<Eigen::half>(p, {.heads = 1, .dim = 160}, what, 1e-3, 334);
}

TEST_CASE("compress: ems compares keys as they were before RoPE") {
  const ems p{.window = 5, .threshold = 0.05F, .with_position = false};
  const rotary halves = rotary::halves(500), adjacent = rotary::interleaved(500);
  const prompt_case what{.queries = 40, .slots = 20, .random = true, .steps = 3, .again = 16};
  check_compress<float>(p, {.heads = 2, .dim = 9, .rope = &halves}, what, 1e-5, 341);
  check_compress<Eigen::half>(
      p, {.heads = 1, .dim = 16, .group = 2, .paged = true, .rope = &adjacent}, what, 1e-3, 342);
}

TEST_CASE("compress: ems on few directions, whose likeness ties") {
  ems p{.window = 5, .threshold = 0.5F};
  for (const index_t dim : {1, 2}) {
    check_compress<float>(p, {.heads = 2, .dim = dim},
                          {.queries = 0, .slots = 20, .shuffled = true}, 1e-5, 345);
    check_compress<float>(p, {.heads = 2, .dim = dim},
                          {.queries = 40, .slots = 20, .shuffled = true}, 1e-5, 346);
  }
}

TEST_CASE("compress: ems over several tiles") {
  check_compress<float>(
      ems{.threshold = 0}, {.heads = 1, .dim = 8},
      {.length = 700, .queries = 40, .slots = 200, .random = true, .shuffled = true, .again = 90},
      1e-5, 351);
  check_compress<Eigen::half>(
      ems{.threshold = 0}, {.heads = 1, .dim = 8},
      {.length = 700, .queries = 40, .slots = 200, .random = true, .rounding = 2e-5F, .again = 90},
      1e-3, 352);
  check_compress<Eigen::half>(ems{.threshold = 0}, {.heads = 1, .dim = 72},
                              {.length = 300, .queries = 20, .slots = 80, .random = true}, 1e-3,
                              354);
  check_compress<float>(ems{.threshold = -1}, {.heads = 1, .dim = 256},
                        {.length = 160, .queries = 20, .slots = 60, .random = true}, 1e-5, 353);
}

TEST_CASE("compress: ems where scores are no numbers, and where there are none") {
  const ems p{.window = 4, .threshold = 0};
  const cache_case c{.heads = 1, .dim = 8};
  check_compress<float>(p, c, {.slots = 24, .nan = true}, 1e-5, 361);
  check_compress<float>(p, c, {.queries = 0, .slots = 24, .nan = true}, 1e-5, 362);
}

TEST_CASE("step: ems") {
  check_decode(ems{.window = 8, .threshold = 0.1F}, 24, 321);
  check_decode(ems{.window = 3, .sinks = 0, .gamma = 1.5F, .threshold = -1}, 16, 371);
}

TEST_CASE("step: ems on few directions, whose likeness ties") {
  ems p{.window = 3, .sinks = 1, .threshold = 1};  // as alike as can be
  check_steps<float>(p, {.heads = 2, .capacity = 17, .dim = 1, .group = 2}, 14, {16}, 60,
                     data::integers, 1e-5, 381);
  p.threshold = 0.5F, p.table = 5;  // tokens make room
  check_steps<float>(p, {.heads = 3, .capacity = 17, .dim = 2}, 16, {16}, 60, data::integers, 1e-5,
                     382);
  p.combine = group_combine::max, p.table = 20;
  check_steps<Eigen::half>(p, {.heads = 1, .capacity = 21, .dim = 3, .group = 4}, 20, {20}, 30,
                           data::integers, 1e-3, 383);
}

/// Often both are unlike the removed entry, and less like it than the zeros behind a tile's end.
TEST_CASE("step: ems with two centres to choose from, on tensor cores") {
  const ems p{.window = 3, .sinks = 0, .threshold = -1};
  check_steps<Eigen::half>(p, {.heads = 3, .capacity = 7, .dim = 8, .group = 2}, 6, {6}, 60,
                           data::integers, 1e-3, 384);
  check_steps<Eigen::bfloat16>(p, {.heads = 1, .capacity = 7, .dim = 136, .group = 9}, 6, {6}, 20,
                               data::integers, 1.6e-2, 385);
}

TEST_CASE("step: ems, several slots leave now and then") {
  const cache_case c{.heads = 3, .capacity = 41, .dim = 8, .group = 2};
  ems p{.window = 8, .gamma = 2, .threshold = 0};
  check_steps<float>(p, c, 30, {24, 37}, 40, data::integers, 1e-5, 391);
  p.table = 10;
  check_steps<float>(p, c, 40, {24, 28}, 30, data::integers, 1e-5, 392);
  p.with_position = false;
  check_steps<float>(p, c, 20, {24}, 20, data::random, 1e-5, 393);
}

TEST_CASE("step: ems, a long stream over several tiles and splits") {
  check_steps<float>(ems{.threshold = -1}, {.heads = 2, .capacity = 1101, .dim = 8, .group = 2},
                     1100, {1100}, 6, data::integers, 1e-5, 395);
}

TEST_CASE("step refuses a state without ems's memory") {
  device_cache<float> kv({.capacity = 40, .dim = 8}, {3, 3}, 1,
                         std::vector<slot_reduce>(5, slot_reduce::anchor), 7);
  std::vector<float> x(16);
  CHECK_THROWS_WITH(
      (policy_calls<ems, float>::step({.window = 8}, kv.view(), kv.state, x.data(),
                                      {x.data(), x.data()}, budget{.slots = 32}, x.data(), {},
                                      order())),
      Catch::Contains("cuda ems: expected a state of 726 floats of memory per head, got 7"));
}

}  // namespace parity_ems_test
}  // namespace kvmeld::cuda
