// SPDX-License-Identifier: MIT
// A hook that a policy means to have and has not is found by the compiler.
#include <catch2/catch.hpp>

#include "support/policies.hpp"

namespace policy_hooks_test {

using kvmeld::head_state;
using kvmeld::index_t;
using kvmeld::kv_head;
using kvmeld::merge_plan;
using kvmeld::observation;
using kvmeld::query_view;
using kvmeld::slot_scratch;
using hook = kvmeld::detail::hook_names;
using kvmeld::detail::misdeclared;

struct least {
  static constexpr std::string_view name() { return "least"; }
  void plan(const kv_head auto&, const head_state&, index_t, slot_scratch&, merge_plan&) const {}
};
struct not_const : least {
  void observe(const kv_head auto&, head_state&, const observation&) {}
};
struct half_const : least {
  void observe(const kv_head auto&, head_state&, const observation&) const {}
  template <class T>
  void observe(const kv_head auto&, head_state&, const query_view<T>&) {}
};
struct other_argument : least {
  void observe(const kv_head auto&, head_state&, float) const {}
};
struct one_scalar : least {  // of queries only: as one may
  void observe(const kv_head auto&, head_state&, const query_view<float>&) const {}
};
struct wrong_columns : least {
  index_t slot_stats() const { return 1; }
};
struct wrong_memory : least {
  std::size_t memory(index_t) const { return 1; }
};
struct budget_of : least {
  index_t min_budget(index_t) const { return 1; }
};
struct batch : least {
  index_t eviction_batch() const { return 1; }
};
struct validates : least {
  void validate() {}
};
struct combines : least {
  int combine = 0;
};
struct plans : least {
  using least::plan;
  template <class T>
  void plan(const kv_head auto&, const head_state&, const query_view<T>&, index_t, slot_scratch&,
            merge_plan&) {}
};
struct guards : least {
  kvmeld::protection protects(const kv_head auto&) const { return {}; }
};
struct updates : least {
  void update_memory(const kv_head auto&, head_state&, const merge_plan&, slot_scratch&) {}
};
struct ends_compress : least {
  void after_compress(const kv_head auto&, head_state&) const {}
};
struct masses : least {
  float mass = 1;
};
struct supports_by : least {
  kvmeld::attention_support supports(index_t) const { return {}; }
};
struct supports_what : least {
  static constexpr bool supports = true;
};
struct supports_little : least {
  static constexpr kvmeld::attention_support supports{.sinks = false};
};
struct closed final : least {};

static_assert(misdeclared<least>() == nullptr);
static_assert(misdeclared<closed>() == nullptr);
static_assert(misdeclared<one_scalar>() == nullptr);
static_assert(misdeclared<not_const>() == &hook::observe);
static_assert(misdeclared<half_const>() == &hook::observe);
static_assert(misdeclared<other_argument>() == &hook::observe);
static_assert(misdeclared<wrong_columns>() == &hook::slot_stats);
static_assert(misdeclared<wrong_memory>() == &hook::memory);
static_assert(misdeclared<budget_of>() == &hook::min_budget);
static_assert(misdeclared<batch>() == &hook::eviction_batch);
static_assert(misdeclared<validates>() == &hook::validate);
static_assert(misdeclared<combines>() == &hook::combine);
static_assert(misdeclared<plans>() == &hook::plan);
static_assert(misdeclared<guards>() == &hook::protects);
static_assert(misdeclared<updates>() == &hook::update_memory);
static_assert(misdeclared<ends_compress>() == &hook::after_compress);
static_assert(misdeclared<masses>() == &hook::mass);
static_assert(misdeclared<supports_by>() == &hook::supports);
static_assert(misdeclared<supports_what>() == &hook::supports);
static_assert(misdeclared<supports_little>() == nullptr);
static_assert(misdeclared<kvmeld::any_policy>() == nullptr);

TEST_CASE("every policy's hooks are called", "[policy]") {
  for (const auto& example : fixtures::every_policy()) {
    INFO(example.name);
    example.policy.visit(
        [](const auto& p) { CHECK(misdeclared<std::remove_cvref_t<decltype(p)>>() == nullptr); });
  }
}

}  // namespace policy_hooks_test
