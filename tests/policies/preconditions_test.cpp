// SPDX-License-Identifier: MIT
// Which policy goes with which model: what the code says, what it refuses, and what the docs print.
#include <algorithm>
#include <catch2/catch.hpp>
#include <fstream>
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
  std::vector<layer> all = {{"soft_cap", plain}, {"sink_logits", plain}, {"alibi_slopes", plain}};
  all[0].spec.soft_cap = 30;
  all[1].spec.sink_logits = {1};
  all[2].spec.alibi_slopes = {0.5F};
  return all;
}

/// The row of docs/reference/policies.md, by what is refused.
std::string row(const any_policy& p) {
  std::string text = "| `" + std::string(p.name()) + "` |";
  const auto add = [&](bool yes) { text += yes ? " yes |" : " no |"; };
  for (const layer& l : layers()) {
    add(goes([&] { kvmeld::check(p, l.spec); }));
  }
  add(kvmeld::declared(p).supports().one_memory);
  add(goes([&] { (void)kvmeld::for_shared(p, 64); }));
  add(kvmeld::declared(p).supports_decode());
  return text;
}

TEST_CASE("the docs' table of what goes with what is the code's", "[policy][docs]") {
  std::vector<std::string> expected, printed;
  for (const any_policy& p : any_policy::every()) {
    expected.push_back(row(p));
  }
  std::ifstream page(paths::docs("reference/policies.md"));
  REQUIRE(page);
  bool in_table = false;
  for (std::string line; std::getline(page, line);) {
    in_table = line.starts_with('|') && (in_table || line.starts_with("| policy | soft cap |"));
    if (in_table && line.starts_with("| `")) {
      printed.push_back(line);
    }
  }
  std::ranges::sort(expected), std::ranges::sort(printed);
  CHECK(printed == expected);
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
