/// A time says little on a shared machine; a ratio to a baseline measured in turn with it says
/// more.
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <random>
#include <string_view>
#include <vector>

namespace bench {

template <class Work>
double seconds(Work&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// For work that needs nothing put back before it can be done again.
struct nothing {
  void operator()() const {}
};

/// Runs `baseline` and `work` in turn, `cycle` times an iteration. Reports the mean time of `work`
/// over the cycle (the benchmark needs `UseManualTime`) and, as counter `name`, the ratio of its
/// median to the baseline's. `prepare` is called before every `work`, outside of its time.
template <class Work, class Baseline, class Prepare = nothing>
void versus(benchmark::State& state, const char* name, Work&& work, Baseline&& baseline,
            Prepare&& prepare = {}, int cycle = 1) {
  for (int i = 0; i < cycle; ++i) {
    prepare();
    work();
    baseline();
  }
  std::vector<double> ours, theirs;
  for (auto _ : state) {
    double a = 0, b = 0;
    for (int i = 0; i < cycle; ++i) {
      b += seconds(baseline);
      prepare();
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

/// How often slow work and its baseline are measured in turn, for `Iterations`: where one takes
/// longer than Google Benchmark's least time, it would settle for one.
inline int pairs = 20;

/// Sets it by `--pairs=N`, which Google Benchmark must not see.
inline void take_pairs(int& argc, char** argv) {
  constexpr std::string_view flag = "--pairs=";
  const auto ours = std::find_if(argv + 1, argv + argc, [&](std::string_view argument) {
    return argument.substr(0, flag.size()) == flag;
  });
  if (ours != argv + argc) {
    pairs = std::max(1, std::atoi(*ours + flag.size()));
    std::rotate(ours, ours + 1, argv + argc);
    --argc;
  }
}

inline std::vector<float> gaussian(std::size_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(n);
  std::generate(out.begin(), out.end(), [&] { return normal(generator); });
  return out;
}

}  // namespace bench
