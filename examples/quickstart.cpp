// SPDX-License-Identifier: MIT
// Compresses one prompt's cache and decodes a token on it. The middle of main is the README's
// snippet.
#include <cstdio>
#include <random>
#include <vector>

#include "kvmeld/kvmeld.hpp"

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto numbers = [&](int n) {
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& y : x) {
      y = normal(random);
    }
    return x;
  };
  const int heads = 8, group = 4, dim = 128, prompt = 2048;
  const auto queries = numbers(prompt * heads * group * dim);  // [prompt, heads · group, dim]
  const auto keys = numbers(prompt * heads * dim), values = numbers(prompt * heads * dim);
  const auto q = numbers(heads * group * dim), k = numbers(heads * dim), v = numbers(heads * dim);
  std::vector<float> out(q.size());

  // clang-format off
  kvmeld::attention_spec spec{.kv_heads = heads, .group = group, .key_dim = dim};   // the model's layer
  spec.rope = kvmeld::rotary::halves(500'000.0);

  kvmeld::cache kv(spec, {.layers = 1, .requests = 1, .capacity = 4096});           // in floats
  kvmeld::compressor meld(kv, kvmeld::fold{}, kvmeld::budget::shared(205));         // slots per head

  const auto all = kv.heads(0, 0);                                                  // layer, request
  kv.append(all, keys, values, prompt);
  meld.prompt(all, kvmeld::queries(queries, prompt, spec));                         // after each layer
  meld.end_prompt(0);                                                               // 2048 → 205 slots

  meld.step(all, {q, k, v}, out);                                                   // a token: attend,
                                                                                    // return to budget
  // clang-format on
  int slots = 0;
  for (int h = 0; h < heads; ++h) {
    slots += kv.head(h).length();
  }
  std::printf("%d tokens in %d slots per head: %.1f MiB held instead of %.1f\n",
              kv.head(0).next_position(), slots / heads,
              static_cast<double>(kv.reserved_bytes() + meld.reserved_bytes()) / 1048576.0,
              2.0 * heads * dim * sizeof(float) * (prompt + 1) / 1048576.0);
}
