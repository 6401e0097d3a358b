/// A time says little on a shared machine; a ratio to a baseline measured in turn with it says
/// more.
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <random>
#include <vector>

namespace bench {

template <class Work>
double seconds(Work&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Runs `baseline` and `work` in turn, `cycle` times an iteration. Reports the mean time of `work`
/// over the cycle (the benchmark needs `UseManualTime`) and, as counter `name`, the ratio of its
/// median to the baseline's.
template <class Work, class Baseline>
void versus(benchmark::State& state, const char* name, Work&& work, Baseline&& baseline,
            int cycle = 1) {
  for (int i = 0; i < cycle; ++i) {
    work();
    baseline();
  }
  std::vector<double> ours, theirs;
  for (auto _ : state) {
    double a = 0, b = 0;
    for (int i = 0; i < cycle; ++i) {
      b += seconds(baseline);
      a += seconds(work);
    }
    ours.push_back(a / cycle), theirs.push_back(b / cycle);
    state.SetIterationTime(ours.back());
  }
  const auto median = [](std::vector<double>& x) {
    const auto middle = x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2);
    std::nth_element(x.begin(), middle, x.end());
    return *middle;
  };
  state.counters[name] = median(ours) / median(theirs);
}

inline std::vector<float> gaussian(std::size_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(n);
  std::generate(out.begin(), out.end(), [&] { return normal(generator); });
  return out;
}

}  // namespace bench
