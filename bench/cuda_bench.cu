// The CUDA kernels against the card's own measured rates: copy bandwidth, and mma.sync on
// registers. Every result is checked before it is timed; L2 is overwritten before every run.
// Without a device it says so and exits with 77.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "cache_on_device.cuh"
#include "card.cuh"
#include "kvfold/cuda/compress.cuh"
#include "kvfold/cuda/policies/d2o.cuh"
#include "kvfold/cuda/policies/ems.cuh"
#include "kvfold/cuda/policies/fold.cuh"
#include "kvfold/cuda/policies/h2o.cuh"
#include "kvfold/cuda/policies/keepkv.cuh"
#include "kvfold/cuda/policies/kvmerger.cuh"
#include "kvfold/cuda/policies/snapkv.cuh"
#include "kvfold/cuda/policies/streaming_llm.cuh"
#include "kvfold/cuda/policies/zsmerge.cuh"
#include "kvfold/cuda/step.cuh"
#include "kvfold/policy.hpp"
#include "search_bench.cuh"

namespace {

using namespace card;

/// Is the attention of head 0's first query what double loops say?
bool attends(const cache_on_device& kv, index_t length) {
  const auto q = kv.q.host(), keys = kv.keys.host(), values = kv.values.host(), out = kv.out.host();
  const auto& s = kv.shape;
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

void report_bytes(benchmark::State& state, double bytes) {
  state.counters["GB/s"] = benchmark::Counter(
      bytes * 1e-9 * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
  state.counters["of_copy"] = benchmark::Counter(
      bytes / copy_rate() * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

template <class Rule>
void attend_observe(benchmark::State& state) {
  const cache_shape shape{static_cast<index_t>(state.range(0)),
                          static_cast<index_t>(state.range(1)),
                          static_cast<index_t>(state.range(1))};
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
  for (auto _ : state) {
    state.SetIterationTime(seconds(run));
  }
  report_bytes(state, kv.bytes());
}

/// A step at the budget: one token comes, one slot is evicted.
template <class Policy>
void step(benchmark::State& state, const Policy& policy) {
  const auto target = static_cast<index_t>(state.range(1));
  cache_on_device kv({static_cast<index_t>(state.range(0)), target, target + 1});
  const auto columns = kv.state(policy);
  const auto view = kv.view();
  const buffer<char> memory(workspace_bytes(policy, view));
  const cuda::workspace work{memory.data(), memory.size()};
  const auto run = [&] {
    cuda::step(policy, view, columns, kv.q.data(),
               cuda::new_tokens<bfloat16>{kv.k.data(), kv.v.data()}, {.target = target},
               kv.out.data(), work, nullptr);
  };
  for (int i = 0; i < 3; ++i) {
    run();
  }
  if (kv.length.host()[0] != target || kv.tokens_total.host()[0] != target + 3) {
    return state.SkipWithError("a head is not at its budget after steps");
  }
  for (auto _ : state) {
    state.SetIterationTime(seconds(run));
  }
  report_bytes(state, kv.bytes());
}

/// Steps of a policy that frees several slots at once: the mean of those from one plan to the next.
template <class Policy>
void steps(benchmark::State& state, const Policy& policy) {
  const auto slots = static_cast<index_t>(state.range(1));
  const budget limit = budget_within(policy, slots);
  const index_t round = limit.trigger_length() - limit.target;
  cache_on_device kv({static_cast<index_t>(state.range(0)), slots, slots + 1});
  const auto columns = kv.state(policy);
  const auto view = kv.view();
  const buffer<char> memory(workspace_bytes(policy, view));
  const auto run = [&] {
    for (index_t i = 0; i < round; ++i) {
      cuda::step(policy, view, columns, kv.q.data(),
                 cuda::new_tokens<bfloat16>{kv.k.data(), kv.v.data()}, limit, kv.out.data(),
                 {memory.data(), memory.size()}, nullptr);
    }
  };
  run(), run();
  const index_t left = kv.length.host()[0];
  if (left < limit.target || left > slots) {
    return state.SkipWithError("a head is not at its budget after steps");
  }
  for (auto _ : state) {
    state.SetIterationTime(seconds(run) / round);
  }
  report_bytes(state, kv.bytes());
}

void column_scores(benchmark::State& state) {
  const auto n = static_cast<index_t>(state.range(1));
  prompt p(static_cast<index_t>(state.range(0)), n, 1);
  const auto view = p.kv.view();
  const buffer<char> memory(cuda::column_scores_workspace_bytes(view.heads, view.group, p.count));
  const buffer<float> total(p.kv.slots());
  const auto run = [&] {
    cuda::column_scores(view, p.rows(), {}, {.total = total.data()}, {memory.data(), memory.size()},
                        nullptr);
  };
  run();
  double sum = 0;  // of one head: every query's probabilities sum to 1
  const auto sums = total.host();
  for (std::size_t s = 0; s < cache_on_device::n(n); ++s) {
    sum += static_cast<double>(sums[s]);
  }
  if (!(std::abs(sum - n) < 1e-3 * n)) {
    return state.SkipWithError("the column sums do not sum to the queries");
  }
  for (auto _ : state) {
    state.SetIterationTime(seconds(run));
  }
  const double flops = 2.0 * 2 * view.heads * 0.5 * n * n * 128;  // causal, two products
  report_matrix_rate(state, flops);
}

template <class Policy>
void compress(benchmark::State& state, const Policy& policy) {
  const auto n = static_cast<index_t>(state.range(1)), target = n / 4;
  prompt p(static_cast<index_t>(state.range(0)), n, 4);
  const auto columns = p.kv.state(policy);
  const auto view = p.kv.view();
  // fold's reference queries are a choice, the others' are the prompt.
  const auto queries = std::is_same_v<Policy, fold> ? p.rows().reference(256) : p.rows();
  const buffer<char> memory(workspace_bytes(policy, view, queries.count, target));
  const cuda::workspace work{memory.data(), memory.size()};
  const auto run = [&] {
    cuda::compress(policy, view, columns, queries, {.target = target}, work, nullptr);
  };
  run();
  const index_t left = p.kv.length.host()[0];
  if (left > target || left < target / 2) {
    return state.SkipWithError("a head is not at its budget after compress");
  }
  for (auto _ : state) {
    p.kv.reset();
    state.SetIterationTime(seconds(run));
  }
}

/// Every second row goes into the one before it: half of the rows move.
void apply(benchmark::State& state) {
  const auto heads = static_cast<index_t>(state.range(0)), n = static_cast<index_t>(state.range(1));
  cache_on_device kv({heads, n, n});
  const auto view = kv.view();
  const std::size_t slots = kv.slots();
  std::vector<index_t> rows(cache_on_device::n(heads), n / 2),
      begin(cache_on_device::n(heads) * cache_on_device::n(n + 1));
  std::vector<merge_source> sources(slots);
  for (index_t h = 0; h < heads; ++h) {
    for (index_t s = 0; s < n; ++s) {
      sources[cache_on_device::n(h) * cache_on_device::n(n) + cache_on_device::n(s)] = {s, 0.5F,
                                                                                        0.5F};
    }
    for (index_t r = 0; r <= n / 2; ++r) {
      begin[cache_on_device::n(h) * cache_on_device::n(n + 1) + cache_on_device::n(r)] = 2 * r;
    }
  }
  const buffer<index_t> on_rows(rows), on_begin(begin);
  const buffer<merge_source> on_edges(sources);
  const buffer<float> mass(slots);
  const cuda::plan_view plan{on_rows.data(), on_begin.data(), on_edges.data(), mass.data()};
  const auto columns = kv.state(streaming_llm{});
  const auto before = kv.keys.host();
  const auto run = [&] { cuda::apply(plan, view, columns, nullptr); };
  run();
  const auto after = kv.keys.host();
  const float want = 0.5F * (__bfloat162float(before[2 * 128]) + __bfloat162float(before[3 * 128]));
  if (!(std::abs(__bfloat162float(after[128]) - want) < 0.02F * (1 + std::abs(want)))) {
    return state.SkipWithError("row 1 is not the mean of rows 2 and 3");
  }
  for (auto _ : state) {
    kv.reset();
    state.SetIterationTime(seconds(run));
  }
  report_bytes(state, 1.5 * kv.bytes());  // every row read, half of them written
}

#define KVFOLD_SHAPES          \
  ArgNames({"heads", "slots"}) \
      ->Args({64, 2048})       \
      ->Args({256, 1024})      \
      ->Args({256, 4096})      \
      ->UseManualTime()        \
      ->Unit(benchmark::kMicrosecond)
BENCHMARK_TEMPLATE(attend_observe, cuda::no_rule)->Name("attend")->KVFOLD_SHAPES;
BENCHMARK_TEMPLATE(attend_observe, cuda::sum_rule)->KVFOLD_SHAPES;
BENCHMARK_CAPTURE(step, streaming_llm, streaming_llm{})->KVFOLD_SHAPES;
BENCHMARK_CAPTURE(step, h2o, h2o{})->KVFOLD_SHAPES;
BENCHMARK_CAPTURE(step, snapkv, snapkv{})->KVFOLD_SHAPES;
BENCHMARK_CAPTURE(step, zsmerge, zsmerge{})->KVFOLD_SHAPES;
BENCHMARK_CAPTURE(step, d2o, d2o{})->KVFOLD_SHAPES;
BENCHMARK_CAPTURE(step, keepkv, keepkv{})->KVFOLD_SHAPES;
BENCHMARK_CAPTURE(step, kvmerger, kvmerger{})->KVFOLD_SHAPES;
BENCHMARK_CAPTURE(step, ems, ems{})->KVFOLD_SHAPES;
BENCHMARK_CAPTURE(steps, fold, fold{})->KVFOLD_SHAPES;
BENCHMARK(apply)->KVFOLD_SHAPES;
BENCHMARK(select_half)->Name("select")->KVFOLD_SHAPES;
BENCHMARK(match_half)->Name("match")->KVFOLD_SHAPES;
BENCHMARK(column_scores)
    ->ArgNames({"heads", "tokens"})
    ->Args({32, 4096})
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);
#define KVFOLD_PROMPT \
  ArgNames({"heads", "tokens"})->Args({8, 4096})->UseManualTime()->Unit(benchmark::kMicrosecond)
BENCHMARK_CAPTURE(compress, streaming_llm, streaming_llm{})->KVFOLD_PROMPT;
BENCHMARK_CAPTURE(compress, h2o, h2o{})->KVFOLD_PROMPT;
BENCHMARK_CAPTURE(compress, snapkv, snapkv{})->KVFOLD_PROMPT;
BENCHMARK_CAPTURE(compress, zsmerge, zsmerge{})->KVFOLD_PROMPT;
BENCHMARK_CAPTURE(compress, d2o, d2o{})->KVFOLD_PROMPT;
BENCHMARK_CAPTURE(compress, keepkv, keepkv{})->KVFOLD_PROMPT;
BENCHMARK_CAPTURE(compress, kvmerger, kvmerger{})->KVFOLD_PROMPT;
BENCHMARK_CAPTURE(compress, ems, ems{})->KVFOLD_PROMPT;
BENCHMARK_CAPTURE(compress, fold, fold{})->KVFOLD_PROMPT;

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no CUDA device");
    return 77;
  }
  cudaDeviceProp card{};
  check(cudaGetDeviceProperties(&card, 0), "properties");
  std::printf("%s: copy %.0f GB/s, mma.sync %.0f TFLOP/s\n", card.name, copy_rate() * 1e-9,
              matrix_rate() * 1e-12);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
