// SPDX-License-Identifier: MIT
// Which policy goes with which model: what the code says, what it refuses, and what the docs print.
#include <algorithm>
#include <catch2/catch.hpp>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "support/paths.hpp"
#include "support/policies.hpp"

namespace preconditions_test {

using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::attention_spec;

struct scores {
  static constexpr std::string_view name() { return "scores"; }
  float score(const kvmeld::head_ref&, const kvmeld::head_state&, kvmeld::index_t) const {
    return 0;
  }
};
struct plans {
  static constexpr std::string_view name() { return "plans"; }
  void plan(const kvmeld::head_ref&, const kvmeld::head_state&, kvmeld::index_t,
            kvmeld::slot_scratch&, kvmeld::merge_plan&) const {}
};
struct says : plans {
  static constexpr kvmeld::attention_support supports() { return {.sinks = false}; }
};
struct weighs : says {
  auto mass(const kvmeld::head_ref&, const kvmeld::head_state&) const {
    return [](kvmeld::index_t, float dot) { return dot; };
  }
};

/// Is `f` not refused?
bool goes(auto f) {
  try {
    f();
    return true;
  } catch (const kvmeld::error& refused) {
    CHECK(refused.code() == kvmeld::errc::unsupported);
    return false;
  }
}

/// A layer with one thing more than a plain one.
struct layer {
  const char* what;
  attention_spec spec;
};
std::vector<layer> layers() {
  const attention_spec plain{.kv_heads = 1, .key_dim = 4};
  std::vector<layer> all = {{"soft cap", plain}, {"sink logits", plain}, {"ALiBi", plain}};
  all[0].spec.soft_cap = 30;
  all[1].spec.sink_logits = {1};
  all[2].spec.alibi_slopes = {0.5F};
  return all;
}

TEST_CASE("the docs' table of what goes with what is the code's", "[policy][docs]") {
  std::map<std::string, std::string> refused;  // and the policies that refuse it
  for (const any_policy& p : any_policy::every()) {
    const auto goes_with = [&](const std::string& what, bool yes) {
      std::string& all = refused[what];
      all += yes ? "" : (all.empty() ? "`" : ", `") + std::string(p.name()) + "`";
    };
    for (const layer& l : layers()) {
      goes_with(l.what, goes([&] { kvmeld::check(p, l.spec); }));
    }
    goes_with("one memory", kvmeld::declared(p).supports().one_memory);
    goes_with("shared budgets", goes([&] { (void)kvmeld::for_shared(p, 64); }));
    goes_with("decode", kvmeld::declared(p).supports_decode());
  }
  std::ifstream page(paths::docs("reference/policies.md"));
  REQUIRE(page);
  const std::string text{std::istreambuf_iterator<char>(page), {}};
  for (const auto& [what, policies] : refused) {
    const std::string row = "\n| " + what + " | " + (policies.empty() ? "–" : policies) + " |\n";
    CAPTURE(row);
    CHECK(text.find(row) != std::string::npos);
  }
}

TEST_CASE("a policy of one's own with a plan is for plain positions until it says more",
          "[policy]") {
  const auto alibi = layers()[2].spec, sinks = layers()[1].spec;
  CHECK_NOTHROW(kvmeld::check(scores{}, alibi));
  CHECK_THROWS_WITH(
      kvmeld::check(plans{}, alibi),
      Catch::Contains(
          "plans: expected attention without alibi_slopes (it merges slots), got some"));
  CHECK_NOTHROW(kvmeld::check(says{}, alibi));
  CHECK_THROWS_WITH(kvmeld::check(says{}, sinks), Catch::Contains("without sink_logits"));
  CHECK(kvmeld::declared(scores{}).supports().one_memory);
  CHECK(!kvmeld::declared(plans{}).supports().one_memory);
}

TEST_CASE("what goes with one memory depends on a policy's mode", "[policy]") {
  const auto one_memory = [](const auto& p) { return kvmeld::declared(p).supports().one_memory; };
  using kvmeld::keepkv, kvmeld::kvmerger, kvmeld::streaming_llm;
  CHECK(one_memory(streaming_llm{}));
  CHECK(!one_memory(streaming_llm{.positions = streaming_llm::position_mode::cache_index}));
  CHECK(one_memory(kvmerger{}));
  CHECK(!one_memory(kvmerger{.scale_values = true}));
  CHECK(!one_memory(keepkv{}));
  CHECK(one_memory(keepkv{.variant = keepkv::mode::code}));
}

TEST_CASE("all policies go behind a seal but those that measure or move every slot", "[policy]") {
  using kvmeld::streaming_llm;
  for (const any_policy& p : any_policy::every()) {
    CHECK(kvmeld::declared(p).supports().seals == (p.name() != "ems"));
  }
  const any_policy moves = streaming_llm{.positions = streaming_llm::position_mode::cache_index};
  CHECK(!kvmeld::declared(moves).supports().seals);
  CHECK(kvmeld::declared(says{}).supports().seals);
  CHECK(!kvmeld::declared(weighs{}).supports().seals);  // whatever it says
}

}  // namespace preconditions_test
