// SPDX-License-Identifier: MIT
// Admission: what a plan says of new slots, with fixed slots as they are.
#include <algorithm>
#include <catch2/catch.hpp>
#include <vector>

#include "kvmeld/merge/pages.hpp"
#include "support/fixtures.hpp"
#include "support/policies.hpp"

namespace append_only_test {

using kvmeld::index_t;
using kvmeld::merge_plan;

/// Of two heads' bytes: are those of the first `fixed` slots the same?
bool same_slots(const std::vector<float>& before, const std::vector<float>& now, index_t fixed,
                index_t dim) {
  const std::ptrdiff_t kept = std::ptrdiff_t{fixed} * (2 * dim + 2);
  return std::ssize(before) >= kept && std::ssize(now) >= kept &&
         std::equal(before.begin(), before.begin() + kept, now.begin());
}

TEST_CASE("fixed slots are kept, and new slots are what the plan says", "[append_only]") {
  auto kv = fixtures::random_cache(9, 2, 1);
  kv.head(0).log_mass(1) = 3;
  kvmeld::slot_scratch scratch;
  merge_plan plan, out;
  plan.reset(9);
  plan.keep(0, 0);
  plan.add({3}), plan.add({5}), plan.end_row(1);                     // a new slot into a fixed one
  plan.add({6}), plan.add({1}), plan.end_row(2);                     // a fixed slot into a new one
  plan.add({8, 0.5F, 0.25F}), plan.add({7, 2, 3}), plan.end_row(4);  // and 4 is dropped
  plan.correct_values(std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8}, 2);
  append_only(plan, kv.head(0), 4, out);
  check(out);
  REQUIRE(out.rows() == 6);
  for (index_t s = 0; s < 4; ++s) {
    CHECK((out.row(s).size() == 1 && out.row(s)[0] == kvmeld::merge_source{s}));
    CHECK(out.log_mass(s) == kv.head(0).log_mass(s));
  }
  CHECK(
      (out.row(4).size() == 1 && out.row(4)[0] == kvmeld::merge_source{6} && out.log_mass(4) == 0));
  REQUIRE(out.row(5).size() == 2);
  CHECK((out.row(5)[0] == kvmeld::merge_source{8, 0.5F, 0.25F} &&
         out.row(5)[1] == kvmeld::merge_source{7, 2, 3}));
  CHECK(out.log_mass(5) == 4);
  const std::vector<float> corrections(out.value_corrections().begin(),
                                       out.value_corrections().end());
  CHECK(corrections == std::vector<float>{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 8});
  CHECK(out.key_corrections().empty());

  CHECK_THROWS_WITH(append_only(plan, kv.head(0), 4, plan),
                    Catch::Contains("expected two plans, got the same one twice"));
  CHECK(plan.rows() == 4);
  append_only(plan, kv.head(0), 0, out);
  CHECK(out.rows() == plan.rows());
  append_only(plan, kv.head(0), 9, out);
  CHECK(out.rows() == 9);
  for (const index_t fixed : {-1, 10}) {
    CHECK_THROWS_WITH(append_only(plan, kv.head(0), fixed, out),
                      Catch::Contains("expected 0 to 9 fixed slots"));
  }
  plan.reset(8);
  CHECK_THROWS_WITH(append_only(plan, kv.head(0), 4, out),
                    Catch::Contains("expected a plan of 9 slots, got 8"));
}

TEST_CASE("chunks are admitted as every policy ranks them, and nothing before them changes",
          "[append_only]") {
  constexpr index_t chunk = 24, dim = 8;
  for (const auto& example : fixtures::every_policy()) {
    INFO(example.name);
    const auto& p = example.policy;
    auto kv = fixtures::random_cache(0, dim, 2, 5 * chunk);
    const auto head = kv.head(0);
    auto state = kvmeld::make_head_state(p, head);
    kvmeld::slot_scratch scratch;
    merge_plan whole, out;
    index_t fixed = 0;
    for (int round = 0; round < 5; ++round) {
      const auto k = fixtures::normal(chunk * dim), v = fixtures::normal(chunk * dim);
      kv.append(0, k, v);
      const fixtures::queries queries(chunk, 2, dim);
      observe(p, head, state, queries.view());
      const auto before = fixtures::bytes_of(head);
      plan(p, head, state, queries.view(), chunk, scratch, whole);
      append_only(whole, head, fixed, out);
      apply(p, out, head, state, scratch);
      CHECK(same_slots(before, fixtures::bytes_of(head), fixed, dim));
      CHECK((head.length() >= fixed && head.length() <= fixed + chunk));
      if (example.exact && kvmeld::declared(p).evicts()) {
        CHECK((round == 0) == (head.length() == chunk));  // the first is admitted whole
      }
      fixed = head.length();
    }
    CHECK((kvmeld::declared(p).evicts() ? fixed < 5 * chunk : fixed == 5 * chunk));
  }
}

TEST_CASE("a decode stream is admitted by every policy, and no slot before the new ones changes",
          "[append_only]") {
  constexpr index_t steps = 96, target = 24, dim = 8, group = 2;
  constexpr kvmeld::budget never{.slots = steps};  // `step` appends, attends and observes
  for (const index_t open : {1, 24}) {             // slots that are not fixed
    for (const auto& example : fixtures::every_policy()) {
      const auto& p = example.policy;
      if (!kvmeld::declared(p).supports_decode()) {
        continue;
      }
      CAPTURE(open, example.name);
      auto kv = fixtures::random_cache(0, dim, group, steps + 1);
      const auto head = kv.head(0);
      auto state = fixtures::make_state(p, kv);
      kvmeld::slot_scratch scratch;
      merge_plan whole, new_tokens;
      std::vector<float> out(group * dim), before;
      for (index_t t = 0; t < steps; ++t) {
        const auto q = fixtures::normal(group * dim), k = fixtures::normal(dim),
                   v = fixtures::normal(dim);
        const index_t fixed = std::max(head.length() + 1 - open, 0);
        before = fixtures::bytes_of(head);  // `step` too does not change them
        step(p, kv, state, {std::span(q), std::span(k), std::span(v)}, never, std::span(out));
        plan(p, head, state[0], target, scratch, whole);
        append_only(whole, head, fixed, new_tokens);
        apply(p, new_tokens, head, state[0], scratch);
        REQUIRE((head.length() >= fixed && head.length() <= fixed + open));
        REQUIRE(same_slots(before, fixtures::bytes_of(head), fixed, dim));
      }
      // One at a time, a policy that keeps the latest in any case admits every token.
      const bool all = !kvmeld::declared(p).evicts() || (open == 1 && example.latest > 0);
      CHECK((all ? head.length() == steps : head.length() < steps));
      CHECK(head.length() >= target / 2);
    }
  }
}

}  // namespace append_only_test
