// SPDX-License-Identifier: MIT
// Keys and values in one memory, as latent attention keeps them: what evicts is right, what merges
// is refused.
#include <catch2/catch.hpp>

#include "kvmeld/policies/d2o.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "kvmeld/policies/zsmerge.hpp"
#include "support/all_heads.hpp"
#include "support/random.hpp"
#include "support/typed_cache.hpp"

namespace {

using fixtures::layout;
using fixtures::strided_view;
using kvmeld::index_t;

constexpr index_t dim = 8, tokens = 40, capacity = 48, target = 20;

std::vector<float> numbers(index_t n) {
  std::normal_distribution<float> gauss;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& e : x) {
    e = gauss(streams::floats);
  }
  return x;
}

/// Prompt and steps under `policy`; the outputs of the steps.
template <class P>
std::vector<float> run(const P& policy, const layout<float>& keys, const layout<float>& values,
                       const std::vector<float>& q, const std::vector<float>& k) {
  strided_view<float> kv({.heads = 1, .dim = dim, .capacity = capacity}, keys, values);
  kv.commit(0, tokens);
  auto state = fixtures::make_state(policy, kv);
  const kvmeld::budget limit{.slots = target};
  fixtures::compress(policy, kv, state, kvmeld::prompt_queries(q.data(), tokens, 1, 1, dim), limit);
  std::vector<float> all, out(dim);
  for (std::size_t t = 0; t < 10; ++t) {
    const auto row = std::span<const float>(k).subspan(t * dim, dim);
    fixtures::step(policy, kv, state, {row, row, row}, limit, out);
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

layout<float> rows_in(std::vector<float>& x) {
  return layout<float>::head_token_dim(x.data(), capacity, dim);
}

}  // namespace

TEST_CASE("what evicts may have values in the memory of keys", "[plan][views]") {
  auto shared = numbers(capacity * dim), keys = shared, values = shared;
  const auto q = numbers(tokens * dim), k = numbers(10 * dim);
  CHECK(run(kvmeld::h2o{}, rows_in(shared), rows_in(shared), q, k) ==
        run(kvmeld::h2o{}, rows_in(keys), rows_in(values), q, k));
}

TEMPLATE_TEST_CASE("what merges is refused values in the memory of keys", "[plan][views][errors]",
                   kvmeld::d2o, kvmeld::zsmerge) {
  auto shared = numbers(capacity * dim);
  const auto q = numbers(tokens * dim), k = numbers(10 * dim);
  const auto before = shared;
  CHECK_THROWS_WITH(run(TestType{}, rows_in(shared), rows_in(shared), q, k),
                    Catch::Contains("expected keys and values in memory of their own"));
  CHECK(shared == before);
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
  CHECK_THROWS_WITH(applied(plain, plain, true), Catch::Contains("rows of slot 1"));
  CHECK_THROWS_AS(applied(plain, half_way, true), kvmeld::error);
  CHECK_THROWS_AS(applied(half_way, plain, true), kvmeld::error);
  CHECK_THROWS_AS(applied(plain, odd, true), kvmeld::error);
  CHECK_THROWS_AS(applied(odd, beside, true), kvmeld::error);
  CHECK_NOTHROW(applied(plain, plain, false));
  CHECK_NOTHROW(applied(plain, beside, true));
  CHECK_NOTHROW(applied(beside, plain, true));
  CHECK_NOTHROW(applied(even, odd, true));
  CHECK_NOTHROW(applied(odd, even, true));
  const auto values = layout<float>::head_dim_token(x + capacity * dim, capacity, dim);
  CHECK_NOTHROW(applied(layout<float>::head_token_dim(x, capacity, dim), values, true));
}
