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
using kvmeld::detail::well_declared;

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
struct shares_what : least {
  static constexpr bool shares = true;
};
struct old_columns : least {
  static constexpr int columns = 3;
};
struct closed final : least {};

static_assert(well_declared<least>());
static_assert(well_declared<closed>());
static_assert(well_declared<one_scalar>());
static_assert(!well_declared<not_const>());
static_assert(!well_declared<half_const>());
static_assert(!well_declared<other_argument>());
static_assert(!well_declared<wrong_columns>());
static_assert(!well_declared<wrong_memory>());
static_assert(!well_declared<budget_of>());
static_assert(!well_declared<batch>());
static_assert(!well_declared<validates>());
static_assert(!well_declared<combines>());
static_assert(!well_declared<plans>());
static_assert(!well_declared<guards>());
static_assert(!well_declared<updates>());
static_assert(!well_declared<ends_compress>());
static_assert(!well_declared<masses>());
static_assert(!well_declared<supports_by>());
static_assert(!well_declared<supports_what>());
static_assert(!well_declared<shares_what>());
static_assert(!well_declared<old_columns>());
static_assert(well_declared<kvmeld::any_policy_or_peer>());

TEST_CASE("every policy's hooks are called", "[policy]") {
  for (const auto& example : fixtures::every_policy()) {
    INFO(example.name);
    example.policy.visit(
        [](const auto& p) { CHECK(well_declared<std::remove_cvref_t<decltype(p)>>()); });
  }
}

}  // namespace policy_hooks_test
