/// How many launches a plan takes: the table "Launches and bytes" of docs/cuda.md.
#pragma once

#include "cuda/device_cache.hpp"
#include "kvfold/cuda/policies/device_policy.cuh"
#include "kvfold/cuda/state.cuh"

namespace kvfold::cuda {

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

}  // namespace kvfold::cuda
