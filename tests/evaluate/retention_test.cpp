// SPDX-License-Identifier: MIT
// The picture of what becomes of every token is of what the cache holds.
#include <catch2/catch.hpp>
#include <random>
#include <vector>

#include "evaluate/policies.hpp"
#include "evaluate/retention_picture.hpp"
#include "support/random.hpp"

namespace retention_test {

using evaluate::fate;
using kvmeld::index_t;

engine::layer_record tokens(const kvmeld::attention_spec& spec, index_t count) {
  engine::layer_record layer;
  std::normal_distribution<float> normal;
  for (auto* const rows : {&layer.q, &layer.k, &layer.v}) {
    rows->resize(count, spec.key_dim * (rows == &layer.q ? spec.group : 1));
    for (Eigen::Index i = 0; i < rows->size(); ++i) {
      rows->data()[i] = normal(streams::floats);
    }
  }
  return layer;
}

TEST_CASE("what the picture of retention keeps is what lies in the cache") {
  const kvmeld::attention_spec spec{.kv_heads = 1, .group = 2, .key_dim = 8};
  constexpr index_t steps = 200, slots = 64;
  const auto layer = tokens(spec, steps);
  for (const char* const name : {"streaming_llm", "h2o", "tova", "d2o", "keepkv", "fold+equal"}) {
    CAPTURE(name);
    const auto policy = evaluate::detail::parse_policy(name).measuring();
    const auto limit = kvmeld::budget_within(policy, slots);
    const auto fates = evaluate::follow(policy, spec, layer, steps, limit);
    kvmeld::cache kv(spec, {.capacity = limit.trigger_length()});
    auto state = kvmeld::make_head_state(policy, kv.head(0));
    kvmeld::workspace work;
    for (index_t t = 0; t < steps; ++t) {
      std::vector<float> out(kvmeld::as_size(spec.group * spec.key_dim));
      kvmeld::step(policy, kv.head(0), state, work, &layer.q(t, 0), &layer.k(t, 0), &layer.v(t, 0),
                   limit, out.data());
      // A slot has the position of a token that it stands for: of each slot one is kept or merged.
      std::vector<char> held(kvmeld::as_size(steps));
      for (index_t s = 0; s < kv.head(0).length(); ++s) {
        held[kvmeld::as_size(kv.head(0).position(s))] = 1;
      }
      for (index_t token = 0; token < steps; ++token) {
        const fate of = fates[kvmeld::as_size(t)][kvmeld::as_size(token)];
        CAPTURE(t, token);
        if (held[kvmeld::as_size(token)] != 0) {
          REQUIRE((of == fate::kept || of == fate::merged));
        } else {
          REQUIRE(of != fate::kept);
        }
      }
    }
  }
}

}  // namespace retention_test
