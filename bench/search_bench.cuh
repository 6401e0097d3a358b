// SPDX-License-Identifier: MIT
/// Benches of the searches alone: which slots are removed, and into which.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "cache_on_device.cuh"
#include "kvmeld/cuda/policies/h2o.cuh"
#include "kvmeld/cuda/search/match.cuh"
#include "kvmeld/cuda/search/select.cuh"
#include "measure.cuh"

namespace card {

/// Half of the slots of every head by score, as H2O has it.
inline void select_half(benchmark::State& state) {
  const auto heads = static_cast<index_t>(state.range(0)), n = static_cast<index_t>(state.range(1));
  const h2o policy;
  cache_on_device kv({heads, n, n});
  const auto columns = kv.state(policy);
  std::mt19937 random(1);
  std::vector<float> score(kv.slots());
  std::generate(score.begin(), score.end(), [&] { return static_cast<float>(random() % 100000); });
  check(cudaMemcpy(columns.columns, score.data(), score.size() * sizeof(float),
                   cudaMemcpyHostToDevice),
        "to device");
  const buffer<index_t> rows(cache_on_device::n(heads)),
      begin(cache_on_device::n(heads) * cache_on_device::n(n + 1));
  const buffer<merge_source> sources(kv.slots());
  const buffer<float> mass(kv.slots());
  const cuda::plan_view plan{rows.data(), begin.data(), sources.data(), mass.data()};
  const budget limit{.slots = n / 2};
  const auto rule = cuda::detail::rule_of(policy, kv.view());
  const auto run = [&] { cuda::select(rule, kv.view(), columns, limit, plan, nullptr); };
  run();
  const auto kept = sources.host();
  std::vector<char> stays(cache_on_device::n(n), 0);
  for (index_t r = 0; r < n / 2; ++r) {
    stays[cache_on_device::n(kept[cache_on_device::n(r)].source)] = 1;
  }
  float lowest = INFINITY, highest = 0;  // of those that compete: kept, evicted
  for (index_t s = policy.sinks; s < n - n / 4; ++s) {
    const float x = score[cache_on_device::n(s)];
    if (stays[cache_on_device::n(s)] != 0) {
      lowest = std::min(lowest, x);
    } else {
      highest = std::max(highest, x);
    }
  }
  if (rows.host()[0] != n / 2 || lowest < highest) {
    return state.SkipWithError("not the highest scores were selected");
  }
  measure(state, run);
}

/// The nearest of half of the slots to each of the others, by cosine.
inline void match_half(benchmark::State& state) {
  const auto heads = static_cast<index_t>(state.range(0)), n = static_cast<index_t>(state.range(1));
  const cache_on_device kv({heads, n, n});
  const auto view = kv.view();
  std::vector<index_t> odd(kv.slots()), even(kv.slots());
  for (std::size_t i = 0; i < kv.slots(); ++i) {
    const auto at = static_cast<index_t>(i % cache_on_device::n(n));
    odd[i] = 2 * (at % (n / 2)) + 1, even[i] = 2 * (at % (n / 2));
  }
  const buffer<index_t> removed(odd), kept(even),
      count(std::vector<index_t>(cache_on_device::n(heads), n / 2)), into(kv.slots());
  const buffer<float> similarity(kv.slots());
  const buffer<char> memory(cuda::match_workspace_bytes(heads, n));
  const auto run = [&] {
    cuda::match(cuda::cosine_similarity{}, view, {removed.data(), count.data()},
                {kept.data(), count.data()}, {into.data(), similarity.data()},
                {memory.data(), memory.size()}, nullptr);
  };
  run();
  const auto keys = kv.keys.host(cache_on_device::n(n * kv.shape.dim));
  const auto cosine = [&](index_t a, index_t b) {
    double ab = 0, aa = 0, bb = 0;
    for (index_t i = 0; i < kv.shape.dim; ++i) {
      const double x = static_cast<double>(
                       __bfloat162float(keys[cache_on_device::n(a * kv.shape.dim + i)])),
                   y = static_cast<double>(
                       __bfloat162float(keys[cache_on_device::n(b * kv.shape.dim + i)]));
      ab += x * y, aa += x * x, bb += y * y;
    }
    return ab / std::sqrt(aa * bb);
  };
  double best = -1;
  for (index_t s = 0; s < n; s += 2) {
    best = std::max(best, cosine(1, s));
  }
  if (!(std::abs(cosine(1, into.host()[0]) - best) < 1e-4)) {
    return state.SkipWithError("not the nearest was found");
  }
  report_operations(state, 2.0 * heads * (n / 2) * (n / 2) * kv.shape.dim, measure(state, run));
}

}  // namespace card
