// SPDX-License-Identifier: MIT
/// A time says little on a shared machine; a ratio to a baseline measured in turn with it says
/// more.
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <ctime>  // clock_gettime
#include <random>
#include <string_view>
#include <vector>

namespace bench {

/// The calling thread's processor time in place of the wall clock: for a machine that has other
/// work too. Set by `--processor_time`.
inline bool processor_time = false;

template <class Work>
double seconds(Work&& work) {
  const auto now = [] {
    timespec t = {};
    clock_gettime(processor_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  };
  const double start = now();
  work();
  return now() - start;
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
/// longer than Google Benchmark's least time, it would take one.
inline int pairs = 20;

/// Takes `flag` out, which Google Benchmark must not see: was it there?
inline bool take_flag(int& argc, char** argv, std::string_view flag) {
  char** const end = std::remove(argv + 1, argv + argc, flag);
  const bool taken = end != argv + argc;
  argc = static_cast<int>(end - argv);
  return taken;
}

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
