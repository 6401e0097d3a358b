// SPDX-License-Identifier: MIT
/// How the benches of the card time and report: medians, and ratios to the card's own rates.
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <vector>

#include "card.cuh"

namespace card {

/// The median seconds of the bench's runs, each behind `before`.
template <class Run, class Before>
double measure(benchmark::State& state, Run run, l2 how, Before before) {
  std::vector<double> taken;
  for (auto _ : state) {
    before();
    taken.push_back(seconds(run, how));
    state.SetIterationTime(taken.back());
  }
  std::nth_element(taken.begin(), taken.begin() + static_cast<std::ptrdiff_t>(taken.size() / 2),
                   taken.end());
  const double median = taken[taken.size() / 2];
  state.counters["median_us"] = median * 1e6;
  return median;
}
template <class Run>
double measure(benchmark::State& state, Run run, l2 how = l2::dirty) {
  return measure(state, run, how, [] {});
}

/// Bytes that have to move, beside the card's copy.
inline void report_bytes(benchmark::State& state, double bytes, double seconds) {
  state.counters["GB/s"] = bytes * 1e-9 / seconds;
  state.counters["of_copy"] = bytes / copy_rate() / seconds;
}

/// Operations, beside the card's mma.sync.
inline void report_operations(benchmark::State& state, double operations, double seconds) {
  state.counters["TFLOP/s"] = operations * 1e-12 / seconds;
  state.counters["of_mma"] = operations / matrix_rate() / seconds;
}

}  // namespace card
