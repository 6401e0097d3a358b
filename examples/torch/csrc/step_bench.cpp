// SPDX-License-Identifier: MIT
// A decode step as C++ calls it, for `python -m kvmeld_torch.speed`: microseconds of every step.
//   step_bench POLICY HEADS GROUP DIM SLOTS STEPS
#include <chrono>
#include <cstdio>
#include <cstdlib>  // std::atoi
#include <random>

#include "kvmeld/compressor.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/peers.hpp"

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "step_bench POLICY HEADS GROUP DIM SLOTS STEPS\n");
    return 2;
  }
  const auto number = [&](int i) { return static_cast<kvmeld::index_t>(std::atoi(argv[i])); };
  const kvmeld::index_t heads = number(2), group = number(3), dim = number(4), slots = number(5);
  // As PyTorch allocates: on whole cache lines.
  const auto floats = static_cast<std::size_t>(heads * (slots + 1) * dim);
  std::vector<float, Eigen::aligned_allocator<float>> keys(floats), values(floats);
  const kvmeld::layout hnd = kvmeld::layout::hnd;
  kvmeld::strided_cache kv({.kv_heads = heads, .group = group, .key_dim = dim},
                           {.capacity = slots + 1}, kvmeld::rows(keys, hnd),
                           kvmeld::rows(values, hnd));
  kvmeld::compressor meld(kv, kvmeld::make_policy<kvmeld::any_policy_or_peer>(argv[1]),
                          kvmeld::budget{.slots = slots});
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto rows = [&](kvmeld::index_t n) {
    std::vector<float> x(static_cast<std::size_t>(n) * static_cast<std::size_t>(dim));
    for (float& e : x) {
      e = normal(random);
    }
    return x;
  };
  std::vector<float> out(static_cast<std::size_t>(heads * group * dim));
  const auto q = rows(heads * group);
  for (kvmeld::index_t i = 0; i < slots + number(6); ++i) {  // the first fill the cache
    const auto k = rows(heads), v = rows(heads);
    const auto begin = std::chrono::steady_clock::now();
    meld.step(kv.heads(0, 0), {.q = q, .k = k, .v = v}, out);
    const std::chrono::duration<double, std::micro> taken =
        std::chrono::steady_clock::now() - begin;
    if (i >= slots) {
      std::printf("%.3f\n", taken.count());
    }
  }
}
