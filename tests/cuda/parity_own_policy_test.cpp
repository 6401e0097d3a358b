// SPDX-License-Identifier: MIT
// Policies of a user's own on the device: nothing but `device_policy` says which kernels they get.
#include <catch2/catch.hpp>

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"
#include "kvmeld/cuda/policies/evicting_rules.cuh"
#include "kvmeld/cuda/policies/h2o.cuh"
#include "kvmeld/merge/rows.hpp"

namespace parity_own_policy_test {

/// Has the name and members of H2O, and is not H2O.
struct impostor : kvmeld::h2o {};

/// Keeps the oldest tokens and the newest one; has H2O's name.
struct oldest {
  static constexpr std::string_view name() { return "h2o"; }
  static kvmeld::index_t min_budget() { return 1; }
  static void validate() {}

  void plan(const kvmeld::kv_head auto& head, const kvmeld::head_state&, kvmeld::index_t target,
            kvmeld::slot_scratch& work, kvmeld::merge_plan& out) const {
    kvmeld::evict(
        head, target, kvmeld::protected_slots(head, 0, 1),
        [&](auto s) { return -head.position(s); }, work, out);
  }
};

struct oldest_rule : kvmeld::cuda::no_rule {
  static constexpr bool evicts = true;

  KVMELD_DEVICE bool is_protected(const kvmeld::cuda::head_context& head, kvmeld::index_t s) const {
    return head.position[s] == head.newest;
  }
  KVMELD_DEVICE unsigned order(const kvmeld::cuda::head_context& head, kvmeld::index_t s) const {
    return kvmeld::cuda::ordered(-head.position[s]);
  }
};

}  // namespace parity_own_policy_test

template <>
struct kvmeld::cuda::device_policy<parity_own_policy_test::oldest> : kvmeld::cuda::evicting_policy {
  static parity_own_policy_test::oldest_rule rule(const parity_own_policy_test::oldest&,
                                                  const attention_spec&) {
    return {};
  }
};

namespace parity_own_policy_test {

using namespace kvmeld;
using namespace kvmeld::cuda;

TEST_CASE("a policy is on the device by its device_policy, not by its name") {
  STATIC_REQUIRE(on_device<h2o>);
  STATIC_REQUIRE(impostor::name() == h2o::name());
  STATIC_REQUIRE_FALSE(on_device<impostor>);
  STATIC_REQUIRE(on_device<oldest>);
}

TEST_CASE("a user's policy runs its own rule in step and compress") {
  check_decode(oldest{}, 24, 301);
  check_policy(oldest{}, 24, 311);
}

}  // namespace parity_own_policy_test
