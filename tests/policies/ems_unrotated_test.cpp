// SPDX-License-Identifier: MIT
// EMS where keys are merged as they were before RoPE: what it must not lose.
#include <catch2/catch.hpp>

#include "support/ems_pair.hpp"

namespace ems_unrotated_test {

using fixtures::index_t;
using kvmeld::budget;
using kvmeld::ems;
using kvmeld::detail::ems_table;

TEST_CASE("ems merged un-rotated loses nothing of tokens that are equal before RoPE", "[ems]") {
  // Four kinds, keys at right angles before they are rotated, values too; lengths of their own.
  const index_t dim = 8, group = 2;
  const ems policy{
      .window = 4, .sinks = 1, .gamma = 12, .with_position = false, .merge_unrotated = true};
  fixtures::cache<float> kv{
      {.heads = 1, .group = group, .dim = dim, .capacity = 17, .rope = fixtures::default_rope}};
  fixtures::cache<float> whole{{.heads = 1, .group = group, .dim = dim, .capacity = 200}};
  auto state = fixtures::make_state(policy, kv);
  auto whole_state = fixtures::make_state(kvmeld::full_cache{}, whole);
  std::vector<float> out(16), full(16);
  for (index_t t = 0; t < 150; ++t) {
    std::vector<float> k(8), v(8);
    k[static_cast<std::size_t>(t % 4)] = 0.5F + std::abs(fixtures::normal(1)[0]);
    v[static_cast<std::size_t>(t % 4)] = 3;
    fixtures::default_rope.rotate(kvmeld::row<float>{k.data()}, dim, t);
    const auto q = fixtures::normal(group * dim);
    fixtures::step(policy, kv, state, {q, k, v}, budget{16}, out);
    fixtures::step(kvmeld::full_cache{}, whole, whole_state, {q, k, v}, budget{200}, full);
    for (std::size_t i = 0; i < 16; ++i) {
      CHECK(out[i] == Approx(full[i]).margin(2e-5));
    }
  }
  CHECK(ems_table(state[0], group).sharing() == 134);
}

}  // namespace ems_unrotated_test
