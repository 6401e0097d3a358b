// SPDX-License-Identifier: MIT
/// Attention of one token over a whole model's cache, next to llama.cpp's: the same rows in memory,
/// one thread, by turns.
#include <ggml-cpu.h>
#include <ggml.h>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvmeld/kvmeld.hpp"
#include "spec.hpp"
#include "versus.hpp"

namespace {

using kvmeld::index_t;

// As Llama 3.1 8B has them.
constexpr index_t layers = 32, kv_heads = 8, group = 4, dim = 128;

template <class Scalar>
constexpr ggml_type type_of = std::same_as<Scalar, kvmeld::q8_0> ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;

std::size_t size(std::ptrdiff_t n) { return static_cast<std::size_t>(n); }

/// `ggml_flash_attn_ext` of every layer, in one graph.
struct graph {
  std::unique_ptr<ggml_context, decltype(&ggml_free)> context{nullptr, &ggml_free};
  std::vector<ggml_tensor*> keys, values, outputs;
  ggml_tensor* queries = nullptr;
  ggml_cgraph* nodes = nullptr;
  ggml_cplan plan = {};
  std::vector<std::uint8_t> work;

  graph(ggml_type type, index_t slots) {
    const std::size_t rows = size(kv_heads) * size(slots) * ggml_row_size(type, dim);
    context.reset(ggml_init({.mem_size = size(layers) * (2 * rows + 65'536) + (1 << 24),
                             .mem_buffer = nullptr,
                             .no_alloc = false}));
    ggml_context* const c = context.get();
    queries = ggml_new_tensor_3d(c, GGML_TYPE_F32, dim, 1, kv_heads * group);
    nodes = ggml_new_graph(c);
    for (index_t l = 0; l < layers; ++l) {
      keys.push_back(ggml_new_tensor_3d(c, type, dim, slots, kv_heads));
      values.push_back(ggml_new_tensor_3d(c, type, dim, slots, kv_heads));
      outputs.push_back(ggml_flash_attn_ext(c, queries, keys.back(), values.back(), nullptr,
                                            1 / std::sqrt(float{dim}), 0, 0));
      ggml_build_forward_expand(nodes, outputs.back());
    }
    plan = ggml_graph_plan(nodes, 1, nullptr);
    work.resize(plan.work_size);
    plan.work_data = work.data();
  }
  void attend() { ggml_graph_compute(nodes, &plan); }
};

/// Rows that ggml owns.
template <class Scalar>
std::vector<kvmeld::rows> rows_in(const std::vector<ggml_tensor*>& tensors) {
  std::vector<kvmeld::rows> all;
  for (const ggml_tensor* x : tensors) {
    const std::span<Scalar> memory(static_cast<Scalar*>(x->data), ggml_nbytes(x) / sizeof(Scalar));
    all.push_back(kvmeld::rows(memory, kvmeld::layout::hnd));
  }
  return all;
}

template <class Scalar>
void token(benchmark::State& state) {
  const auto slots = static_cast<index_t>(state.range(0));
  graph theirs(type_of<Scalar>, slots);
  kvmeld::strided_cache kv(bench::spec(kv_heads, group, dim), {.layers = layers, .capacity = slots},
                           rows_in<Scalar>(theirs.keys), rows_in<Scalar>(theirs.values));
  const std::size_t numbers = size(kv_heads) * size(slots) * size(dim);
  const auto keys = bench::gaussian(numbers, 1), values = bench::gaussian(numbers, 2);
  for (index_t l = 0; l < layers; ++l) {
    kv.append(kv.heads(l, 0), keys, values, slots);
  }
  const auto q = bench::gaussian(size(kv_heads * group * dim), 3);
  std::copy(q.begin(), q.end(), static_cast<float*>(theirs.queries->data));
  std::vector<float> out(q.size());
  const auto ours = [&] {
    for (index_t h = 0; h < kv.heads(); ++h) {
      const std::ptrdiff_t first = std::ptrdiff_t{h % kv_heads} * group * dim;
      kvmeld::attend(kv.head(h), q.data() + first, out.data() + first);
    }
    benchmark::DoNotOptimize(out.data());
  };
  ours(), theirs.attend();
  const Eigen::Map<const Eigen::ArrayXf> a(out.data(), static_cast<Eigen::Index>(out.size())),
      b(static_cast<const float*>(theirs.outputs.back()->data), a.size());
  state.counters["apart"] = static_cast<double>((a - b).matrix().norm() / a.matrix().norm());
  bench::versus(state, "vs_ggml", ours, [&] { theirs.attend(); });
  state.SetBytesProcessed(state.iterations() * 2 * layers *
                          static_cast<std::int64_t>(ggml_nbytes(theirs.keys[0])));
}

}  // namespace

int main(int argc, char** argv) {
  bench::processor_time = bench::take_flag(argc, argv, "--processor_time");
  const auto add = [](const char* name, void (*run)(benchmark::State&)) {
    benchmark::RegisterBenchmark(name, run)
        ->ArgName("slots")
        ->Arg(256)
        ->Arg(1024)
        ->Arg(8192)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  };
  add("token/q8_0", token<kvmeld::q8_0>);
  add("token/f16", token<Eigen::half>);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
