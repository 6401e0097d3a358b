// SPDX-License-Identifier: MIT
// Finite in, finite out: sums that a storage cannot hold are not made.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "support/fixtures.hpp"
#include "support/policies.hpp"

namespace range_test {

using fixtures::index_t;
using fixtures::normal;
using kvmeld::budget;

constexpr index_t dim = 32, group = 2, prompt = 70, steps = 60;
constexpr budget most{.slots = 32, .trigger = 35};

/// `n` numbers of magnitudes of 0.9 to 1 times `size`, with the signs of `like`.
std::vector<float> large(std::span<const float> like, float size) {
  auto x = normal(static_cast<index_t>(like.size()));
  std::ranges::transform(x, like, x.begin(), [&](float e, float sign) {
    return std::copysign(size * (1 - 0.1F * std::min(std::abs(e), 1.0F)), sign);
  });
  return x;
}

bool is_finite(const kvmeld::kv_head auto& head) {
  return std::ranges::all_of(fixtures::bytes_of(head), [](float x) { return std::isfinite(x); });
}

/// A prompt and steps, keys and values as held of these sizes. Where tokens are `alike` but for a
/// tenth, sums of them grow; else what is fitted to them does.
void check_finite(const kvmeld::any_policy_or_peer& policy, const kvmeld::storage_pair& type,
                  bool alike, float key_size, float value_size) {
  streams::restart();
  const fixtures::cache_shape shape{.heads = 1, .group = group, .dim = dim};
  kvmeld::cache kv(shape.spec(), {.capacity = 90, .keys = type.keys, .values = type.values});
  auto state = fixtures::make_state(policy, kv);
  const auto one = normal(dim), q = normal(prompt * group * dim);
  const auto token = [&](float size) { return large(alike ? one : normal(dim), size); };
  const auto value = [&] {
    auto x = token(value_size);
    kv.head(0).rotates_values() ? kvmeld::detail::hadamard(x.data(), dim) : void();
    return x;
  };
  for (index_t t = 0; t < prompt; ++t) {
    const auto key = token(key_size);
    kv.append(kv.heads(0, 0), key, value(), 1);
  }
  REQUIRE(is_finite(kv.head(0)));
  fixtures::compress(policy, kv, state, kvmeld::prompt_queries(q.data(), prompt, 1, group, dim),
                     most);
  REQUIRE(is_finite(kv.head(0)));
  REQUIRE((kv.head(0).length() <= most.slots || !kvmeld::declared(policy).evicts()));
  std::vector<float> out(group * dim);
  for (index_t t = 0; t < std::min(steps, kv.head(0).capacity() - kv.head(0).length()) &&
                      kvmeld::declared(policy).supports_decode();
       ++t) {
    const auto q_now = normal(group * dim), key = token(key_size), v = value();
    fixtures::step(policy, kv, state, {q_now, key, v}, most, out);
    REQUIRE(is_finite(kv.head(0)));
  }
}

std::vector<fixtures::example> policies() {
  auto all = fixtures::every_policy();
  all.push_back({"cam into two", kvmeld::cam{.merge = 2}});
  all.push_back({"kvmerger over gaps", kvmeld::kvmerger{.gaps_break = false, .period = 1}});
  return all;
}

TEST_CASE("finite keys and values stay so under every policy, up to the end of every storage",
          "[half][q8_0][q4_0]") {
  using kvmeld::storage;
  for (const auto& example : policies()) {
    for (const bool keys : {false, true}) {
      for (const bool alike : {false, true}) {
        CAPTURE(example.name, keys, alike);
        const auto check = [&](const kvmeld::storage_pair& type, float of_k, float of_v) {
          check_finite(example.policy, type, alike, keys ? of_k : 1, of_v);
        };
        check(storage::f16, 6.4e4F, 6.4e4F);
        check(storage::bf16, 6.4e4F, 6.4e4F);
        check(storage::q8_0, 8e6F, 8e6F);
        check(storage::f32, 8e6F, 8e6F);
        check(storage::q4_0, 5.2e5F, 5.2e5F);
        check({storage::q8_0, storage::q4_0}, 8e6F, 5.2e5F);
      }
    }
  }
}

TEST_CASE("what a storage cannot hold is evicted, not merged", "[half]") {
  using half = Eigen::half;
  // Two slots of values that a half holds, though not their sum.
  const auto made = [](float value, float weight) {
    fixtures::cache<half> kv{{.heads = 1, .dim = 2, .capacity = 4}};
    kv.append(0, std::vector<float>{1, 2, 3, 4}, std::vector<float>{value, 1, value, 2});
    kv.head(0).log_mass(0) = 0.5F;
    kvmeld::merge_plan plan;
    plan.reset(2);
    plan.add({0, 0.5F, weight}), plan.add({1, 0.5F, weight}), plan.end_row(3);
    const std::vector<float> delta = {1, 1};
    plan.correct_values(delta, 2);
    kvmeld::merge::keep_in_range(kv.head(0), plan);
    return plan;
  };
  CHECK(made(3e4F, 1).row(0).size() == 2);
  CHECK(made(3e4F, 1).value_correction(0)[0] == 1);
  CHECK(made(65504, 0.5F).row(0).size() == 2);  // the mean fits
  const auto evicted = made(4e4F, 1);
  REQUIRE(evicted.row(0).size() == 1);
  CHECK(evicted.row(0)[0] == kvmeld::merge_source{0});
  CHECK(evicted.log_mass(0) == 0.5F);
  CHECK(evicted.value_correction(0)[0] == 0);
  CHECK_NOTHROW(check(evicted));
  // Numbers that a policy should not have made are refused, not hidden.
  const auto broken = made(4e4F, std::nanf(""));
  CHECK(broken.row(0).size() == 2);
  CHECK_THROWS_AS(check(broken), kvmeld::error);
}

}  // namespace range_test
