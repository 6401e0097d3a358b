// SPDX-License-Identifier: MIT
// A head stepped by itself, in a workspace of the caller's.
#include <catch2/catch.hpp>
#include <vector>

#include "kvmeld/compress/one_head.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "support/random.hpp"

namespace workspace_test {

using kvmeld::index_t;

std::vector<float> numbers(index_t n) {
  std::normal_distribution<float> gauss;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& e : x) {
    e = gauss(streams::floats);
  }
  return x;
}

TEST_CASE("a step makes room in the workspace that it is given", "[step]") {
  constexpr index_t group = 2, dim = 16, steps = 40;
  const kvmeld::h2o policy;
  const kvmeld::budget limit{24};
  kvmeld::cache kv({.kv_heads = 2, .group = group, .key_dim = dim}, {.capacity = 64});
  auto one = kvmeld::make_head_state(policy, kv.head(0)), other = one;
  kvmeld::workspace reserved, fresh, small;
  reserved.reserve(kv.head(0));
  small.reserve(1, 4, 2);  // for another kind of head
  for (index_t t = 0; t < steps; ++t) {
    const auto q = numbers(group * dim), k = numbers(dim), v = numbers(dim);
    std::vector<float> wanted(group * dim), out(group * dim);
    step(policy, kv.head(0), one, reserved, q.data(), k.data(), v.data(), limit, wanted.data());
    step(policy, kv.head(1), other, t % 2 == 0 ? fresh : small, q.data(), k.data(), v.data(), limit,
         out.data());
    REQUIRE(out == wanted);
    REQUIRE(kv.head(1).length() == kv.head(0).length());
  }
  CHECK(kv.head(1).length() == limit.slots);
}

}  // namespace workspace_test
