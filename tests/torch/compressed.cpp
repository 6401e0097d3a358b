// SPDX-License-Identifier: MIT
// Which tokens kvmeld's compressor keeps of a prompt, for test_shared.py.
//   kvmeld_torch_compressed POLICY SLOTS LAYERS HEADS GROUP DIM TOKENS ROPE < FLOATS
// FLOATS: of each layer keys and values [tokens, heads, dim], then queries [tokens, heads · group,
// dim]. A line for each head: the positions of its slots.
#include <cstdio>
#include <cstdlib>  // std::atoi, std::atof
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/peers.hpp"

int main(int argc, char** argv) {
  if (argc != 9) {
    return 2;
  }
  const auto number = [&](int i) { return static_cast<kvmeld::index_t>(std::atoi(argv[i])); };
  const kvmeld::index_t layers = number(3), heads = number(4), group = number(5), dim = number(6),
                        tokens = number(7);
  kvmeld::attention_spec spec{.kv_heads = heads, .group = group, .key_dim = dim};
  spec.rope = kvmeld::rotary::halves(std::atof(argv[8]));
  kvmeld::cache kv(spec, {.layers = layers, .requests = 1, .capacity = tokens + 1});
  kvmeld::compressor meld(kv, kvmeld::make_policy<kvmeld::any_policy_or_peer>(argv[1]),
                          kvmeld::budget::shared(number(2)));
  const auto read = [&](kvmeld::index_t rows) {
    std::vector<float> x(static_cast<std::size_t>(tokens * rows * dim));
    return std::fread(x.data(), sizeof(float), x.size(), stdin) == x.size() ? x
                                                                            : std::vector<float>();
  };
  for (kvmeld::index_t layer = 0; layer < layers; ++layer) {
    const auto k = read(heads), v = read(heads), q = read(heads * group);
    kv.append(kv.heads(layer, 0), k, v, tokens);
    meld.prompt(kv.heads(layer, 0), kvmeld::queries(q, tokens, spec));
  }
  meld.end_prompt(0);
  for (kvmeld::index_t h = 0; h < kv.heads(); ++h) {
    for (kvmeld::index_t s = 0; s < kv.head(h).length(); ++s) {
      std::printf("%d ", kv.head(h).position(s));
    }
    std::printf("\n");
  }
}
