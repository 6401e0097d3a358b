// How many launches a plan takes: the table "Launches and bytes" of docs/cuda.md.
#include <catch2/catch.hpp>

#include "cuda/device_cache.hpp"
#include "kvfold/cuda/policies/d2o.cuh"
#include "kvfold/cuda/policies/ems.cuh"
#include "kvfold/cuda/policies/fold.cuh"
#include "kvfold/cuda/policies/h2o.cuh"
#include "kvfold/cuda/policies/keepkv.cuh"
#include "kvfold/cuda/policies/kvmerger.cuh"
#include "kvfold/cuda/policies/streaming_llm.cuh"
#include "kvfold/cuda/policies/zsmerge.cuh"
#include "kvfold/cuda/state.cuh"

namespace kvfold::cuda {
namespace {

/// `plan(rule, cache, state, budgets, memory, stream)`, by default the policy's of a step.
template <class Policy, class Plan>
index_t launches_of_plan(const Policy& policy, Plan plan) {
  device_cache<half> kv({.heads = 2, .capacity = 40, .dim = 8}, {40, 33}, 1);
  const auto view = kv.view();
  device_buffer<unsigned char> state(state_bytes(policy, view));
  const auto columns = make_state_view(policy, view, {state.data(), state.size()}, order());
  const auto rule = device_policy<Policy>::rule(policy, view.dim);
  using plan_memory = typename detail::plan_memory_of<std::decay_t<decltype(rule)>>::type;
  plan_memory work;
  workspace_allocator count;
  work.allocate(count, rule, detail::shape_of(view));
  device_buffer<unsigned char> memory(count.used());
  workspace_allocator from({memory.data(), memory.size()});
  work.allocate(from, rule, detail::shape_of(view));
  const emulator::traffic counted;
  plan(rule, view, columns, head_budgets(budget{.target = 24}), work, order());
  return counted.launches;
}
template <class Policy>
index_t launches_of_plan(const Policy& policy) {
  return launches_of_plan(policy,
                          [](const auto&... call) { device_policy<Policy>::plan(call...); });
}

TEST_CASE("plans take as many launches as the guide says") {
  CHECK(launches_of_plan(h2o{}) == 2);
  CHECK(launches_of_plan(streaming_llm{}) == 2);
  CHECK(launches_of_plan(zsmerge{}) == 6);
  CHECK(launches_of_plan(d2o{}) == 6);
  CHECK(launches_of_plan(keepkv{}) == 6);
  CHECK(launches_of_plan(kvmerger{}) == 7);
  CHECK(launches_of_plan(ems{}) == 7);
  CHECK(launches_of_plan(fold{}) == 15);
  CHECK(launches_of_plan(fold{.pins = fold::pin_rule::scores}) == 16);
  const auto prompt = [](const auto&... call) { detail::merge_first(call...); };
  CHECK(launches_of_plan(keepkv{}, prompt) == 7 + 1);  // a tile of joiners
}

}  // namespace
}  // namespace kvfold::cuda
