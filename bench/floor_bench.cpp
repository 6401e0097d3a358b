// SPDX-License-Identifier: MIT
/// What this machine can do at best on one thread, measured as the rest is: bytes read a second,
/// products a second, exponentials a second. A time below these is a mistake in the measurement.
#include <benchmark/benchmark.h>

#include <Eigen/Core>
#include <cstdint>

namespace {

/// Far beyond every cache at 512 MiB; at 512 KiB within the second level's.
void read(benchmark::State& state) {
  const Eigen::Index floats = state.range(0) * 1024 / static_cast<std::int64_t>(sizeof(float));
  const Eigen::VectorXf x = Eigen::VectorXf::Ones(floats);
  for (auto _ : state) {
    benchmark::DoNotOptimize(x.sum());
  }
  state.SetBytesProcessed(state.iterations() * state.range(0) * 1024);
}

void product(benchmark::State& state) {
  const Eigen::Index n = state.range(0);
  const Eigen::MatrixXf a = Eigen::MatrixXf::Random(n, n), b = Eigen::MatrixXf::Random(n, n);
  Eigen::MatrixXf c(n, n);
  for (auto _ : state) {
    c.noalias() = a * b;
    benchmark::DoNotOptimize(c.data());
  }
  state.counters["flop_per_second"] = benchmark::Counter(
      2.0 * static_cast<double>(n * n * n), benchmark::Counter::kIsIterationInvariantRate);
}

void exponential(benchmark::State& state) {
  const Eigen::ArrayXf x = Eigen::ArrayXf::Random(state.range(0));
  Eigen::ArrayXf y(x.size());
  for (auto _ : state) {
    y = x.exp();
    benchmark::DoNotOptimize(y.data());
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

BENCHMARK(read)->Name("floor/read/f32")->ArgName("kib")->Arg(512)->Arg(512 * 1024);
BENCHMARK(product)
    ->Name("floor/product/f32")
    ->ArgName("n")
    ->Arg(2048)
    ->Unit(benchmark::kMillisecond);
BENCHMARK(exponential)->Name("floor/exp/f32")->ArgName("floats")->Arg(16384);

}  // namespace

BENCHMARK_MAIN();
