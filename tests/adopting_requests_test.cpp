// SPDX-License-Identifier: MIT
// The code of docs/adopting.md: layers one after the other, with requests that end and begin.
#include <catch2/catch.hpp>
#include <vector>

#include "kvmeld/compress.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "support/own_engine.hpp"

using namespace own_engine;

TEST_CASE("layer by layer, with requests that end and begin", "[adopting]") {
  const text x;
  const int layers = 2, requests = 3;
  kvmeld::cache kv({.kv_heads = heads, .group = group, .key_dim = dim},
                   {.layers = layers, .requests = requests, .capacity = 26});
  const kvmeld::h2o policy{.recent = 0.25F};
  const kvmeld::budget budget{.slots = 24};
  kvmeld::state state = kvmeld::make_state(policy, kv);
  std::vector<float> out(2 * heads * group * dim);
  for (int t = 0; t < steps; ++t) {
    const auto rows = [&](const float* of, std::size_t n) { return std::span(of, 2 * heads * n); };
    const kvmeld::step_input in{rows(x.query(t, 0), group * dim), rows(x.key(t, 0), dim),
                                rows(x.value(t, 0), dim)};
    const int active[] = {t % requests, (t + 1) % requests};  // two of the three

    for (int layer = 0; layer < layers; ++layer) {
      // in: rotated q [active, heads, group, dim], k and v [active, heads, dim], of this layer.
      kvmeld::step(policy, kv, state, kv.heads(layer, active), in, budget, std::span(out));
    }
  }
  CHECK(kv.head(0).length() == 24);

  for (int layer = 0; layer < layers; ++layer) {
    for (int h = 0; h < heads; ++h) {
      const int first = layer * requests * heads + h;  // of request 0
      copy(kv, state, first, first + heads);           // request 1 forks it
      clear(kv, state, first);                         // request 0 has ended
    }
  }
  CHECK((kv.head(0).length() == 0 && kv.head(heads).length() == 24));
}
