// SPDX-License-Identifier: MIT
// The CUDA kernels against the card's own measured rates: copy bandwidth, and mma.sync on
// registers. Every result is checked before it is timed; L2 is overwritten before every run.
// Without a device it says so and exits with 77.
#include <benchmark/benchmark.h>

#include <cstdio>
#include <exception>
#include <string>

#include "card.cuh"
#include "cluster_bench.cuh"
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/ems.cuh"
#include "kvmeld/cuda/policies/keepkv.cuh"
#include "kvmeld/cuda/policies/kvmerger.cuh"
#include "kvmeld/cuda/policies/snapkv.cuh"
#include "kvmeld/cuda/policies/tova.cuh"
#include "kvmeld/cuda/policies/zsmerge.cuh"
#include "prompt_bench.cuh"
#include "search_bench.cuh"
#include "serving_bench.cuh"
#include "step_bench.cuh"

namespace {

using namespace card;

template <class Bench>
benchmark::internal::Benchmark* add(const std::string& name, const Bench& bench, int runs = 30) {
  const auto guarded = [bench](benchmark::State& state) {
    try {
      bench(state);
    } catch (const std::exception& error) {  // the others go on
      state.SkipWithError(error.what());
    }
  };
  return benchmark::RegisterBenchmark(name.c_str(), guarded)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(runs);
}

constexpr index_t shapes[3][2] = {{64, 2048}, {256, 1024}, {256, 4096}};

void add_attention() {
  for (const l2 how : {l2::dirty, l2::clean}) {
    auto* const all = add(how == l2::dirty ? "attend" : "attend_clean", [how](auto& state) {
                        attend_observe<cuda::no_rule>(state, how);
                      })->ArgNames({"heads", "slots", "group"});
    for (const auto& s : shapes) {
      for (const index_t group : {1, 4, 8}) {
        all->Args({s[0], s[1], group});
      }
    }
  }
}

/// With every group where 256 heads have 1024 slots, and the other shapes with a group of 4.
/// `plans`: every step that evicts, so a sixteenth of the slots go at once.
template <class Policy>
void add_step(const Policy& policy, bool plans = false) {
  auto* const all =
      add(
          "step/" + std::string(policy.name()),
          [policy, plans](auto& state) {
            step(state, policy, plans ? static_cast<index_t>(state.range(1)) / 16 : 1);
          },
          plans ? 3 : 30)
          ->ArgNames({"heads", "slots", "group"});
  for (const index_t group : {1, 4, 8}) {
    all->Args({256, 1024, group});
  }
  if (!plans) {
    all->Args({64, 2048, 4})->Args({256, 4096, 4});
  }
}

template <class Policy>
void add_prompt(const Policy& policy, index_t heads, int runs) {
  add(
      "compress/" + std::string(policy.name()), [policy](auto& state) { compress(state, policy); },
      runs)
      ->ArgNames({"heads", "tokens"})
      ->Args({heads, 4096});
}

void add_all() {
  add_attention();
  add_step(streaming_llm{}), add_step(h2o{}), add_step(tova{}), add_step(snapkv{});
  add_step(zsmerge{}), add_step(d2o{}, true), add_step(keepkv{}, true), add_step(ems{}, true);
  add_step(kvmerger{}, true), add_step(fold{}, true);
  for (const bool narrow : {true, false}) {
    add(narrow ? "serve" : "serve_whole_arrays", [narrow](auto& state) { serve(state, narrow); })
        ->ArgNames({"heads", "run", "slots", "arrays"})
        ->Args({256, 256, 1024, 32768})
        ->Args({256, 8, 1024, 32768});
  }
  for (const auto& [name, what] : {std::pair("column_scores", asked::all),
                                   {"column_scores_given", asked::log_sums_given},
                                   {"column_scores_window", asked::window}}) {
    add(name, [what = what](auto& state) { column_scores(state, what); })
        ->ArgNames({"heads", "tokens", "group"})
        ->Args({32, 4096, 1})
        ->Args({8, 4096, 4});
  }
  add("leverage", leverage)
      ->ArgNames({"heads", "tokens"})
      ->Args({8, 4096})
      ->Args({256, 1024})
      ->Args({256, 4096});
  struct search {
    const char* name;
    void (*bench)(benchmark::State&);
  };
  for (const search& x :
       {search{"apply", apply_half}, {"select", select_half}, {"match", match_half}}) {
    auto* const all = add(x.name, x.bench)->ArgNames({"heads", "slots"});
    for (const auto& s : shapes) {
      all->Args({s[0], s[1]});
    }
  }
  for (const search& x :
       {search{"cluster/seeds", cluster_seeds}, {"cluster/nearest", cluster_nearest}}) {
    add(x.name, x.bench)->ArgNames({"heads", "slots"})->Args({8, 4096})->Args({256, 4096});
  }
  add("apply_long_row", apply_long_row)->ArgNames({"heads", "slots"})->Args({8, 4096});
  add("plan/h2o", [](auto& state) { compress(state, h2o{}, false); })
      ->ArgNames({"heads", "tokens"})
      ->Args({8, 4096});
  add_prompt(streaming_llm{}, 8, 30), add_prompt(snapkv{}, 8, 30), add_prompt(tova{}, 8, 15);
  add_prompt(h2o{}, 8, 15), add_prompt(zsmerge{}, 8, 15), add_prompt(d2o{}, 8, 15);
  add_prompt(kvmerger{}, 8, 15), add_prompt(ems{}, 8, 15), add_prompt(keepkv{}, 8, 7);
  add_prompt(fold{}, 8, 5);
  add_prompt(snapkv{}, 256, 5), add_prompt(h2o{}, 256, 3), add_prompt(zsmerge{}, 256, 3);
  add_prompt(fold{}, 256, 1);
}

}  // namespace

int main(int argc, char** argv) try {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no CUDA device");
    return 77;
  }
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "properties");
  std::printf("%s: copy %.0f GB/s, mma.sync %.0f TFLOP/s\n", properties.name, copy_rate() * 1e-9,
              matrix_rate() * 1e-12);
  benchmark::AddCustomContext("card", properties.name);
  benchmark::AddCustomContext("copy_GB/s", std::to_string(copy_rate() * 1e-9));
  benchmark::AddCustomContext("mma_TFLOP/s", std::to_string(matrix_rate() * 1e-12));
  benchmark::Initialize(&argc, argv);
  add_all();
  benchmark::RunSpecifiedBenchmarks();
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
