// SPDX-License-Identifier: MIT
/// A step as a serving engine makes it: requests of different lengths, in arrays with slots for
/// whole prompts, some heads at a time. Arguments: heads, heads that run, slots, slots of arrays.
#pragma once

#include "step_bench.cuh"

namespace card {

/// H2O's step of heads at budgets between half of the slots and all of them, group 4. `narrow`: has
/// the view the capacity that the largest budget needs, or that of the arrays?
inline void serve(benchmark::State& state, bool narrow) {
  const auto heads = static_cast<index_t>(state.range(0)),
             run_heads = static_cast<index_t>(state.range(1)),
             slots = static_cast<index_t>(state.range(2));
  cache_on_device kv(
      {heads, slots, slots + 1, 128, 4, static_cast<index_t>(state.range(3)) - slots - 1});
  std::vector<budget> budgets;
  std::vector<index_t> run_list;
  double bytes = 0;  // of K and V
  for (index_t h = 0; h < heads; ++h) {
    const index_t own = slots - h * 37 % (slots / 2 + 1);
    budgets.push_back({.slots = own}), kv.lengths[cache_on_device::n(h)] = own;
    if (h % (heads / run_heads) == 0) {
      run_list.push_back(h), bytes += 2.0 * own * kv.shape.dim * sizeof(bfloat16);
    }
  }
  const buffer<budget> on_device(budgets);
  const buffer<index_t> list(run_list);
  const auto columns = kv.state(h2o{});
  kv.reset();
  auto view = kv.view().with_active(list.data(), static_cast<index_t>(run_list.size()));
  if (!narrow) {
    view.capacity = view.stride();
  }
  const buffer<char> memory(workspace_bytes(h2o{}, view));
  const auto run = [&] {
    cuda::step(h2o{}, view, columns, kv.q.data(),
               cuda::new_tokens<bfloat16>{kv.k.data(), kv.v.data()},
               cuda::head_budgets(budgets, on_device.data()), kv.out.data(),
               {memory.data(), memory.size()}, nullptr);
  };
  run();
  const auto left = kv.length.host();
  for (const index_t h : run_list) {
    if (left[cache_on_device::n(h)] != budgets[cache_on_device::n(h)].slots) {
      return state.SkipWithError("a head is not at its budget after a step");
    }
  }
  state.counters["workspace_MB"] = static_cast<double>(memory.size()) * 1e-6;
  report_bytes(state, bytes, measure(state, run));
}

}  // namespace card
