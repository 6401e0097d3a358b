// SPDX-License-Identifier: MIT
#include <cstdint>
#include <numeric>
#include <vector>

#include "engine.hpp"

/// A prompt is compressed, then tokens are decoded.
double decode(int tokens) {
  const kvmeld::index_t heads = 2, group = 2, dim = 8, prompt = 64;
  std::uint32_t bits = 1;
  const auto numbers = [&](kvmeld::index_t n) {
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& y : x) {
      bits = bits * 1664525U + 1013904223U;
      y = static_cast<float>(bits >> 8) / 8388608.0F - 1.0F;
    }
    return x;
  };
  kvmeld::cache kv({.kv_heads = heads, .group = group, .key_dim = dim}, {.capacity = prompt});
  kvmeld::compressor meld(kv, kvmeld::d2o{}, kvmeld::budget{.slots = 24});
  const auto keys = numbers(prompt * heads * dim), values = numbers(prompt * heads * dim);
  kv.append(kv.heads(0, 0), keys, values, prompt);
  const auto queries = numbers(prompt * heads * group * dim);
  meld.prompt(kv.heads(0, 0), kvmeld::queries(queries, prompt, kv.spec()));
  meld.end_prompt(0);
  std::vector<float> out(static_cast<std::size_t>(heads * group * dim));
  double sum = 0;
  for (int t = 0; t < tokens; ++t) {
    const auto q = numbers(heads * group * dim), k = numbers(heads * dim), v = numbers(heads * dim);
    meld.step(kv.heads(0, 0), {q, k, v}, out);
    sum = std::accumulate(out.begin(), out.end(), sum);
  }
  return sum;
}
