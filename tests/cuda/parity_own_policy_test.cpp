// Policies of a user's own on the device: nothing but `device_policy` says which kernels they get.
#include <catch2/catch.hpp>

#include "cuda/prompt_parity.hpp"
#include "cuda/step_parity.hpp"
#include "kvfold/cuda/policies/evicting_rules.cuh"
#include "kvfold/cuda/policies/h2o.cuh"
#include "kvfold/merge/evict.hpp"

namespace {

/// Has the name and members of H2O, and is not H2O.
struct impostor : kvfold::h2o {};

/// Keeps the oldest tokens and the newest one; has H2O's name.
struct oldest {
  static constexpr std::string_view name() { return "h2o"; }
  static kvfold::index_t min_budget() { return 1; }
  static void validate() {}

  void plan(const kvfold::kv_head auto& head, const kvfold::head_state&, kvfold::index_t target,
            kvfold::slot_scratch& work, kvfold::merge_plan& out) const {
    kvfold::evict(
        head, target, kvfold::protected_slots(head, 0, 1),
        [&](auto s) { return -head.position(s); }, work, out);
  }
  kvfold::slot_removal choose_victim(const kvfold::kv_head auto& head, const kvfold::head_state&,
                                     kvfold::index_t, const kvfold::key_comparison&) const {
    return {.removed =
                kvfold::search::lowest_scored(head.length(), kvfold::protected_slots(head, 0, 1),
                                              [&](auto s) { return -head.position(s); })};
  }
};

struct oldest_rule : kvfold::cuda::no_rule {
  static constexpr bool evicts = true;

  KVFOLD_DEVICE bool is_protected(const kvfold::cuda::head_context& head, kvfold::index_t s) const {
    return head.position[s] == head.newest;
  }
  KVFOLD_DEVICE unsigned order(const kvfold::cuda::head_context& head, kvfold::index_t s) const {
    return kvfold::cuda::ordered(-head.position[s]);
  }
};

}  // namespace

template <>
struct kvfold::cuda::device_policy<oldest> : kvfold::cuda::evicting_policy {
  static oldest_rule rule(const oldest&, index_t) { return {}; }
};

namespace kvfold::cuda {
namespace {

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

}  // namespace
}  // namespace kvfold::cuda
