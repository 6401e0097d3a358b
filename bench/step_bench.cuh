// SPDX-License-Identifier: MIT
/// Benches of a token: attention, and steps at the budget. Arguments: heads, slots, group.
#pragma once

#include <cmath>
#include <vector>

#include "cache_on_device.cuh"
#include "kvmeld/cuda/policies/h2o.cuh"
#include "kvmeld/cuda/step.cuh"
#include "measure.cuh"

namespace card {

/// Is the attention of head 0's first query what double loops say?
inline bool attends(const cache_on_device& kv, index_t length) {
  const auto& s = kv.shape;
  const auto rows = cache_on_device::n(length * s.dim), one = cache_on_device::n(s.dim);
  const auto q = kv.q.host(one), keys = kv.keys.host(rows), values = kv.values.host(rows),
             out = kv.out.host(one);
  std::vector<double> p;
  double max = -1e300, sum = 0;
  for (index_t t = 0; t < length; ++t) {
    double dot = 0;
    for (index_t i = 0; i < s.dim; ++i) {
      dot += static_cast<double>(__bfloat162float(q[cache_on_device::n(i)])) *
             static_cast<double>(__bfloat162float(keys[cache_on_device::n(t * s.dim + i)]));
    }
    p.push_back(dot / std::sqrt(static_cast<double>(s.dim)));
    max = std::max(max, p.back());
  }
  for (double& x : p) {
    sum += x = std::exp(x - max);
  }
  for (index_t i = 0; i < s.dim; ++i) {
    double want = 0;
    for (index_t t = 0; t < length; ++t) {
      want += p[cache_on_device::n(t)] / sum *
              static_cast<double>(__bfloat162float(values[cache_on_device::n(t * s.dim + i)]));
    }
    if (!(std::abs(want - static_cast<double>(__bfloat162float(out[cache_on_device::n(i)]))) <
          0.02 * (1 + std::abs(want)))) {
      return false;
    }
  }
  return true;
}

template <class Rule>
void attend_observe(benchmark::State& state, l2 how) {
  const cache_shape shape{
      static_cast<index_t>(state.range(0)), static_cast<index_t>(state.range(1)),
      static_cast<index_t>(state.range(1)), 128, static_cast<index_t>(state.range(2))};
  cache_on_device kv(shape);
  const buffer<char> memory(workspace_bytes(kv.view()));
  const cuda::workspace work{memory.data(), memory.size()};
  const auto view = kv.view();
  const auto columns = kv.state(h2o{});
  const auto run = [&] {
    cuda::attend_observe(Rule{}, view, columns, kv.q.data(), kv.out.data(), nullptr, work, nullptr);
  };
  run();
  if (!attends(kv, shape.length)) {
    return state.SkipWithError("attention is not what double loops say");
  }
  report_bytes(state, kv.bytes(), measure(state, run, how));
}

/// Steps from one eviction to the next, of which this is the mean: `freed` slots go at once. The
/// engine knows the lengths, and says of which step no head is due.
template <class Policy>
void step(benchmark::State& state, const Policy& policy, index_t freed) {
  const auto slots = static_cast<index_t>(state.range(1));
  const budget limit{slots + 1 - freed, slots + 1};
  const cuda::head_budgets limits = limit;
  cache_on_device kv({static_cast<index_t>(state.range(0)), slots, slots + 1, 128,
                      static_cast<index_t>(state.range(2))});
  const auto columns = kv.state(policy);
  const auto view = kv.view();
  const buffer<char> memory(workspace_bytes(policy, view));
  const auto one = [&](const cuda::head_budgets& within) {
    cuda::step(policy, view, columns, kv.q.data(),
               cuda::new_tokens<bfloat16>{kv.k.data(), kv.v.data()}, within, kv.out.data(),
               {memory.data(), memory.size()}, nullptr);
  };
  const auto run = [&] {
    for (index_t i = 1; i < freed; ++i) {
      one(limits.with_none_due());
    }
    one(limits);
  };
  one(limits), run();
  const index_t left = kv.length.host()[0];
  if (left < limit.slots || left > slots) {
    return state.SkipWithError("a head is not at its budget after steps");
  }
  const double seconds = measure(state, run) / freed;
  state.counters["median_us"] = seconds * 1e6;
  report_bytes(state, kv.bytes(), seconds);
}

}  // namespace card
