// SPDX-License-Identifier: MIT
// Uses a policy that the library has never heard of (custom_policy.hpp), as any other.
#include "custom_policy.hpp"

#include <cstdio>
#include <random>
#include <vector>

#include "kvmeld/kvmeld.hpp"

int main() {
  constexpr kvmeld::index_t tokens = 1024, dim = 64, target = 128;
  kvmeld::cache kv({.kv_heads = 1, .key_dim = dim}, {.capacity = tokens});
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> keys(tokens * dim), values(tokens * dim);
  for (auto* x : {&keys, &values}) {
    for (float& y : *x) {
      y = normal(random);
    }
  }
  kv.append(kv.heads(0, 0), keys, values, tokens);

  const custom::lowest_norm policy{.recent = 32};
  kvmeld::compressor meld(kv, policy, kvmeld::budget{.slots = target});
  meld.end_prompt(0);
  std::printf("lowest_norm: %d tokens in %d slots, %zu bytes\n", tokens, kv.head(0).length(),
              kv.bytes());
}
