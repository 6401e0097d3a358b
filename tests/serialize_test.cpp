// SPDX-License-Identifier: MIT
// A saved cache goes on bit for bit.
#include <catch2/catch.hpp>

#include "support/fixtures.hpp"
#include "support/policies.hpp"
#include "support/saved.hpp"

namespace serialize_test {

using fixtures::index_t;
using fixtures::normal;

TEMPLATE_TEST_CASE("a loaded cache goes on bit for bit", "[serialize]", float, Eigen::half,
                   Eigen::bfloat16) {
  for (const auto& example : fixtures::every_policy()) {
    INFO(example.name);
    fixtures::goes_on<TestType>(example.policy);
  }
}

TEMPLATE_TEST_CASE("whatever bits a state has, they are loaded as they were saved", "[serialize]",
                   float, Eigen::half, Eigen::bfloat16) {
  for (const auto& example : fixtures::every_policy()) {
    INFO(example.name);
    fixtures::cache<TestType> one({.heads = 2, .group = 2, .dim = 8, .capacity = 32}), other = one;
    auto state = fixtures::make_state(example.policy, one);
    auto loaded = fixtures::make_state(example.policy, other);
    for (index_t h = 0; h < 2; ++h) {
      one.append(h, normal(20 * 8), normal(20 * 8));
      state[h].extend(20);
      for (index_t c = 0; c < state[h].slot_stats(); ++c) {
        std::ranges::copy(normal(20), state[h].column(c).begin());
      }
      for (float& x : state[h].memory()) {
        x = std::bit_cast<float>(static_cast<std::uint32_t>(fixtures::random_bits()()));
      }
    }
    std::istringstream in(fixtures::saved(example.policy, one, state));
    fixtures::load(in, example.policy, other, loaded);
    CHECK(fixtures::everything(other, loaded) == fixtures::everything(one, state));
  }
}

}  // namespace serialize_test
