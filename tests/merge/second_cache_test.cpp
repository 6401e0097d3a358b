// SPDX-License-Identifier: MIT
// One plan on two caches: another model's, or the same rows in Q8_0.
#include <catch2/catch.hpp>
#include <cstring>
#include <vector>

#include "support/fixtures.hpp"
#include "support/placed.hpp"
#include "support/policies.hpp"

namespace second_cache_test {

using kvmeld::index_t;
using kvmeld::merge_plan;
using kvmeld::q8_0;

/// What a head holds, in Q8_0.
fixtures::cache<q8_0> in_q8_0(fixtures::cache<float>& from) {
  fixtures::cache<q8_0> kv(from.shape());
  kvmeld::detail::copy_slots(from.head(0), kv.head(0));
  return kv;
}

/// A plan that a policy makes of a head.
merge_plan plan_of(const kvmeld::any_policy_or_peer& policy, const kvmeld::head_ref& head,
                   index_t target) {
  auto state = kvmeld::make_head_state(policy, head);
  const fixtures::queries queries(head.length(), head.group(), head.dim());
  observe(policy, head, state, queries.view());
  kvmeld::slot_scratch scratch;
  merge_plan out;
  plan(policy, head, state, queries.view(), target, scratch, out);
  return out;
}

TEST_CASE("a plan that evicts moves rows of Q8_0 byte for byte", "[second][q8_0]") {
  auto kv = fixtures::random_cache(60, 64, 2);
  auto second = in_q8_0(kv), before = second;
  const merge_plan plan = plan_of(kvmeld::h2o{}, kv.head(0), 24);
  apply(plan, kv.head(0));
  apply(plan, second.head(0));
  REQUIRE(second.head(0).length() == 24);
  for (index_t r = 0; r < 24; ++r) {
    CHECK(second.head(0).position(r) == kv.head(0).position(r));
    const index_t anchor = plan.anchor(r), s = fixtures::placed(plan)[static_cast<std::size_t>(r)];
    CHECK(std::memcmp(second.head(0).key(s).data, before.head(0).key(anchor).data, 68) == 0);
    CHECK(std::memcmp(second.head(0).value(s).data, before.head(0).value(anchor).data, 68) == 0);
  }
}

TEST_CASE("a plan that merges costs rows of Q8_0 one more rounding", "[second][q8_0]") {
  for (const kvmeld::any_policy_or_peer& policy : std::vector<kvmeld::any_policy_or_peer>{
           kvmeld::zsmerge{}, kvmeld::d2o{.beta = 0}, kvmeld::fold{}}) {
    INFO(policy.name());
    auto kv = fixtures::random_cache(128, 64, 1);
    auto second = in_q8_0(kv);
    const merge_plan plan = plan_of(policy, kv.head(0), 48);
    fixtures::cache<float> floats(kv.shape());  // what the plan makes of the rounded rows, in float
    kvmeld::detail::copy_slots(second.head(0), floats.head(0));
    apply(plan, floats.head(0));
    apply(plan, second.head(0));
    auto expected = in_q8_0(floats);
    REQUIRE(second.head(0).length() == 48);
    for (index_t r = 0; r < 48; ++r) {
      CHECK(std::memcmp(second.head(0).key(r).data, expected.head(0).key(r).data, 68) == 0);
      CHECK(std::memcmp(second.head(0).value(r).data, expected.head(0).value(r).data, 68) == 0);
      CHECK(second.head(0).log_mass(r) == expected.head(0).log_mass(r));
    }
  }
}

TEST_CASE("a draft model's cache follows the plans of the model", "[second]") {
  auto kv = fixtures::random_cache(50, 16, 4), draft = fixtures::random_cache(50, 6, 1);
  auto expected = draft;
  const merge_plan whole = plan_of(kvmeld::attention_matching{.recent = 4}, kv.head(0), 20);
  REQUIRE_FALSE(whole.value_corrections().empty());
  const auto bytes = fixtures::bytes_of(draft.head(0));
  CHECK_THROWS_WITH(apply(whole, draft.head(0)),
                    Catch::Contains("expected a value correction of dim 6, got 16"));
  CHECK(fixtures::bytes_of(draft.head(0)) == bytes);
  merge_plan plan = whole;
  plan.clear_corrections();  // they were measured on the model's keys and values
  apply(whole, kv.head(0)), apply(plan, draft.head(0));
  REQUIRE(draft.head(0).length() == kv.head(0).length());
  for (index_t r = 0; r < draft.head(0).length(); ++r) {
    CHECK(draft.head(0).position(r) == kv.head(0).position(r));
    CHECK(draft.head(0).log_mass(r) == kv.head(0).log_mass(r));
    const index_t s = fixtures::placed(whole)[static_cast<std::size_t>(r)];
    for (index_t i = 0; i < 6; ++i) {
      CHECK(draft.head(0).key(s)[i] == expected.head(0).key(whole.anchor(r))[i]);
    }
  }
  CHECK_THROWS_WITH(apply(plan, draft.head(0)), Catch::Contains("a plan of"));
}

TEST_CASE("corrections of values are refused where these are held rotated, or no longer are",
          "[second][q4_0][errors]") {
  auto kv = fixtures::random_cache(50, 32, 2);
  kvmeld::cache rotated(kv.spec(), {.capacity = 51, .values = kvmeld::storage::q4_0});
  kvmeld::detail::copy_slots(kv.head(0), rotated.head(0));
  const auto refuses = [](const merge_plan& plan, const kvmeld::head_ref& head, const char* why) {
    const auto bytes = fixtures::bytes_of(head);
    CHECK_THROWS_WITH(apply(plan, head), Catch::Contains(why));
    CHECK(fixtures::bytes_of(head) == bytes);
  };
  const kvmeld::attention_matching policy{.recent = 4};
  merge_plan plan = plan_of(policy, kv.head(0), 20);
  const merge_plan of_rotated = plan_of(policy, rotated.head(0), 20);
  refuses(plan, rotated.head(0),
          "apply: expected corrections of values held rotated, got those of un-rotated ones");
  refuses(of_rotated, kv.head(0),
          "apply: expected corrections of values held un-rotated, got those of rotated ones");
  plan.clear_corrections();
  CHECK_NOTHROW(apply(plan, kv.head(0)));
  CHECK_NOTHROW(apply(of_rotated, rotated.head(0)));
}

}  // namespace second_cache_test
