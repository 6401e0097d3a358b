// SPDX-License-Identifier: MIT
// Plans carried out for a policy: what is refused changes nothing, its memory included.
#include <catch2/catch.hpp>

#include "kvmeld/peers/key_diff.hpp"
#include "kvmeld/policies/d2o.hpp"
#include "kvmeld/policies/ems.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "support/all_heads.hpp"
#include "support/random.hpp"
#include "support/typed_cache.hpp"

namespace apply_test {

using kvmeld::index_t;
using kvmeld::merge_plan;

constexpr index_t dim = 8, tokens = 40, target = 20;

std::vector<float> numbers(index_t n) {
  std::normal_distribution<float> gauss;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& e : x) {
    e = gauss(streams::floats);
  }
  return x;
}

template <class P>
P small() {
  return {};
}
template <>
kvmeld::ems small<kvmeld::ems>() {
  return {.window = 4};
}

/// A head that was measured, and the plan that its policy makes for it.
template <class P>
struct planned {
  P policy = small<P>();
  fixtures::cache<float> kv{{.heads = 1, .dim = dim, .capacity = 64}};
  fixtures::state state = fixtures::make_state(policy, kv);
  std::vector<float> q = numbers(tokens * dim);
  kvmeld::slot_scratch work = {};
  merge_plan plan = {};

  planned() {
    kv.append(0, numbers(tokens * dim), numbers(tokens * dim));
    const auto queries = kvmeld::prompt_queries(q.data(), tokens, 1, 1, dim);
    observe(policy, kv.head(0), state[0], queries);
    kvmeld::plan(policy, kv.head(0), state[0], queries, target, work, plan);
  }
  std::vector<float> everything() {
    std::vector<float> all(state[0].memory().begin(), state[0].memory().end());
    all.push_back(static_cast<float>(state[0].length()));
    all.push_back(static_cast<float>(kv.head(0).length()));
    for (index_t c = 0; c < state[0].slot_stats(); ++c) {
      all.insert(all.end(), state[0].column(c).begin(), state[0].column(c).end());
    }
    for (index_t s = 0; s < kv.head(0).length(); ++s) {
      all.insert(all.end(), {kv.head(0).key(s)[0], kv.head(0).value(s)[0]});
      all.insert(all.end(), {kv.head(0).log_mass(s), float(kv.head(0).position(s))});
    }
    return all;
  }
  void refuses(const merge_plan& change, const char* message) {
    const auto before = everything();
    CHECK_THROWS_WITH(apply(policy, change, kv.head(0), state[0], work), Catch::Contains(message));
    CHECK(everything() == before);
  }
};

TEMPLATE_TEST_CASE("a plan that a policy's head refuses changes nothing", "[plan][errors]",
                   kvmeld::d2o, kvmeld::ems, kvmeld::key_diff) {
  planned<TestType> head;
  SECTION("a plan for another length") {
    const auto row = numbers(dim);
    head.kv.head(0).push(row.data(), row.data());
    head.refuses(head.plan, "expected a plan of 41 slots");
  }
  SECTION("a plan that breaks its laws") {
    merge_plan twice = head.plan;
    twice.keep(tokens - 1, 0);
    twice.keep(tokens - 1, 0);
    head.refuses(twice, "merge_plan");
  }
  SECTION("a correction of another dim") {
    merge_plan corrected = head.plan;
    corrected.correct_values(std::vector<float>(static_cast<std::size_t>(target)), 1);
    head.refuses(corrected, "expected a value correction of dim 8");
  }
  SECTION("a state that is too small, or another policy's") {
    const kvmeld::h2o other;
    fixtures::state of_h2o = fixtures::make_state(other, head.kv);
    CHECK_THROWS_WITH(apply(head.policy, head.plan, head.kv.head(0), of_h2o[0], head.work),
                      Catch::Contains("h2o"));
    CHECK(head.kv.head(0).length() == tokens);
  }
  SECTION("what fits is carried out") {
    apply(head.policy, head.plan, head.kv.head(0), head.state[0], head.work);
    CHECK(head.kv.head(0).length() == target);
  }
}

}  // namespace apply_test
