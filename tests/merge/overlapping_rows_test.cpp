// SPDX-License-Identifier: MIT
// Rows of keys and values that overlap and are not one memory (latent_test): what merges is
// refused.
#include <catch2/catch.hpp>

#include "kvmeld/merge/apply.hpp"
#include "support/random.hpp"
#include "support/typed_cache.hpp"

namespace overlapping_rows_test {

using fixtures::layout;
using fixtures::strided_view;
using kvmeld::index_t;

constexpr index_t dim = 8, capacity = 48;

std::vector<float> numbers(index_t n) {
  std::normal_distribution<float> gauss;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& e : x) {
    e = gauss(streams::floats);
  }
  return x;
}

TEST_CASE("a plan that merges names the slot whose rows overlap", "[plan][views][errors]") {
  auto memory = numbers(2 * capacity * dim);
  const auto applied = [&](const layout<float>& keys, const layout<float>& values, bool merges) {
    strided_view<float> kv({.heads = 1, .dim = dim, .capacity = capacity}, keys, values);
    kv.commit(0, 4);
    kvmeld::merge_plan plan;
    plan.reset(4);
    plan.keep(0, 0);
    plan.add({1, 0.5F, 0.5F});
    if (merges) {
      plan.add({3, 0.5F, 0.5F});
    } else {
      plan.reset(4), plan.keep(1, 0);
      return apply(plan, kv.head(0));
    }
    plan.end_row(0);
    apply(plan, kv.head(0));
  };
  float* const x = memory.data();
  const layout<float> plain{x, 0, 2 * dim, 1}, beside{x + dim, 0, 2 * dim, 1},
      half_way{x + dim / 2, 0, 2 * dim, 1}, even{x, 0, 2 * dim, 2}, odd{x + 1, 0, 2 * dim, 2};
  CHECK_THROWS_WITH(applied(plain, half_way, true), Catch::Contains("rows of slot 1"));
  CHECK_THROWS_AS(applied(half_way, plain, true), kvmeld::error);
  CHECK_THROWS_AS(applied(plain, odd, true), kvmeld::error);
  CHECK_THROWS_AS(applied(odd, beside, true), kvmeld::error);
  CHECK_NOTHROW(applied(plain, half_way, false));
  CHECK_NOTHROW(applied(plain, beside, true));
  CHECK_NOTHROW(applied(beside, plain, true));
  CHECK_NOTHROW(applied(even, odd, true));
  CHECK_NOTHROW(applied(odd, even, true));
  const auto values = layout<float>::head_dim_token(x + capacity * dim, capacity, dim);
  CHECK_NOTHROW(applied(layout<float>::head_token_dim(x, capacity, dim), values, true));
}

}  // namespace overlapping_rows_test
