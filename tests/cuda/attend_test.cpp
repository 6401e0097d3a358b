// SPDX-License-Identifier: MIT
// Attention, split and combined, against double loops: every scalar, dim, group and layout, lengths
// from nothing on, and what a rule makes of the probabilities.
#include <catch2/catch.hpp>

#include "cuda/attention_oracle.hpp"
#include "kvmeld/cuda/step.cuh"

namespace kvmeld::cuda {
namespace attend_test {

TEST_CASE("attention takes every dim, group, scalar and layout") {
  std::uint64_t seed = 1;
  const sum_rule rule{.decay = 0.5F};
  for (const index_t dim : {32, 40, 64, 128, 33, 100, 192, 256}) {
    for (const index_t group : {1, 2, 3, 4, 5, 8, 16}) {
      if (dim % 32 != 0 && group > 3) {
        continue;
      }
      const cache_case c{.heads = 2,
                         .capacity = 70,
                         .dim = dim,
                         .group = group,
                         .paged = group % 2 == 1,
                         .odd = dim % 8 == 0 ? 0 : 3,
                         .sequences = group % 4 == 0};
      in_turn(seed++, [&](auto x) {  // 7 groups: every dim and every group meets every scalar
        check_attention<decltype(x)>(rule, c, {67, group % 5}, seed);
      });
    }
  }
  for (const index_t group : {6, 7, 9, 10, 11, 12, 13, 14, 15}) {
    in_turn(seed++, [&](auto x) {
      check_attention<decltype(x)>(rule, {.capacity = 70, .dim = 32, .group = group},
                                   {67, group % 5}, seed);
    });
  }
  for (const index_t group : {17, 128}) {  // beyond a block's: of few splits, and of fewer
    const cache_case c{.heads = 1, .capacity = 2049, .dim = 16, .group = group, .sinks = true};
    check_attention<half>(rule, c, {2049}, seed++);
    check_attention<float>(rule, c, {300}, seed++);
    check_attention<bfloat16>(no_rule{}, {.capacity = 90, .dim = 72, .group = group}, {90, 9},
                              seed++);
  }
  for (const index_t group : {1, 2, 4, 8}) {  // two loads a row
    check_attention<float>(rule, {.heads = 1, .capacity = 70, .dim = 256, .group = group}, {67},
                           seed++);
  }
}

TEST_CASE("attention takes every length, over one split and several") {
  std::uint64_t seed = 1000;
  for (index_t length = 0; length <= 33; ++length) {
    check_attention<float>(sum_rule{}, {.heads = 1, .capacity = 33, .dim = 32}, {length}, seed++);
  }
  for (const index_t length : {1, 128, 255, 256, 257, 513, 1024, 2049}) {
    check_attention<half>(sum_rule{}, {.heads = 2, .capacity = 2049, .dim = 32, .group = 2},
                          {length, 2049 - length}, seed++);
  }
}

TEST_CASE("attention caps logits and counts sinks, over one split and several") {
  std::uint64_t seed = 1500;
  for (const index_t group : {1, 3, 12}) {
    cache_case c{.capacity = 400, .dim = 40, .group = group};
    for (const bool odd : {false, true}) {
      c.odd = odd ? 3 : 0, c.soft_cap = group == 3 ? 0.0F : 1.5F, c.sinks = group != 1;
      in_turn(seed++, [&](auto x) {
        check_attention<decltype(x)>(sum_rule{}, c, {400, 0}, seed);
        check_attention<decltype(x)>(sum_rule{}, c, {90, 1}, seed);
        auto few = c;
        few.capacity = 90;
        check_attention<decltype(x)>(no_rule{}, few, {90, 0}, seed);
      });
    }
  }
}

TEST_CASE("probabilities enter the score as sum, mean or max, decayed or as a running maximum") {
  std::uint64_t seed = 2000;
  for (const auto combine : {group_combine::sum, group_combine::mean, group_combine::max}) {
    for (const bool max : {false, true}) {
      const sum_rule rule{.combine = combine, .decay = 0.75F, .max = max};
      check_attention<float>(rule, {.heads = 2, .capacity = 90, .dim = 32, .group = 4}, {90, 50},
                             seed++);
    }
  }
  check_attention<float>(no_rule{}, {.heads = 2, .capacity = 90, .dim = 32, .group = 4}, {90, 50},
                         seed++);
}

TEST_CASE("attention is the same in many orders of threads") {
  for (std::uint64_t seed = 3000; seed < 3006; ++seed) {
    check_attention<half>(sum_rule{}, {.heads = 2, .capacity = 300, .dim = 64, .group = 4},
                          {300, 130}, seed);
  }
}

TEST_CASE("attention refuses a small workspace and missing queries") {
  device_cache<float> kv({.dim = 32}, {3, 3}, 1);
  float x = 0;
  device_buffer<unsigned char> memory(workspace_bytes(kv.view()));
  const workspace w{memory.data(), memory.size()};
  CHECK_THROWS_WITH(attend(kv.view(), &x, &x, nullptr, {&x, 4}, order()),
                    Catch::Contains("bytes (workspace_bytes), got 4"));
  CHECK_THROWS_WITH(attend<float>(kv.view(), nullptr, &x, nullptr, w, order()),
                    Catch::Contains("expected queries and out [2, 1, 32], got null"));
}

}  // namespace attend_test
}  // namespace kvmeld::cuda
