// SPDX-License-Identifier: MIT
/// Two threads against one, the same work by turns: decode steps of 32 heads, and a prompt's
/// compression of 8. And what memory itself gives two threads.
#include <Eigen/Core>
#include <string>
#include <type_traits>

#include "kvmeld/kvmeld.hpp"
#include "spec.hpp"
#include "versus.hpp"

namespace {

using kvmeld::index_t;

constexpr const char* ratio = "vs_one_thread";
constexpr index_t dim = 128, group = 4;
const kvmeld::openmp two{2};

std::size_t size(index_t n) { return static_cast<std::size_t>(n); }

kvmeld::cache filled(index_t heads, index_t of_group, index_t slots, index_t room) {
  kvmeld::cache kv(bench::spec(heads, of_group, dim), {.capacity = room});
  for (index_t h = 0; h < heads; ++h) {
    const auto seed = static_cast<unsigned>(2 * h);
    kv.append(kvmeld::head_range{h, 1}, bench::gaussian(size(slots) * size(dim), seed),
              bench::gaussian(size(slots) * size(dim), seed + 1), slots);
  }
  return kv;
}

/// The sum of 512 MiB, half of it a thread.
void read(benchmark::State& state) {
  constexpr Eigen::Index floats = Eigen::Index{1} << 27;
  const Eigen::VectorXf x = Eigen::VectorXf::Ones(floats);
  const auto sum = [&](const auto& run, index_t parts) {
    run(parts, [&](index_t i, index_t) {
      benchmark::DoNotOptimize(x.segment(i * (floats / parts), floats / parts).sum());
    });
  };
  bench::versus(
      state, ratio, [&] { sum(two, 2); }, [&] { sum(kvmeld::serial{}, 2); });
}

/// The same tokens through two caches, each with a compressor of its own.
template <class Policy>
void step(benchmark::State& state, const Policy& policy) {
  const auto slots = static_cast<index_t>(state.range(0)), heads = index_t{32};
  const kvmeld::budget budget = kvmeld::budget_within(policy, slots);
  const auto q = bench::gaussian(size(heads) * size(dim), 1), k = q, v = q;
  std::vector<float> out(q.size());
  auto one_kv = filled(heads, 1, slots, slots + 1), two_kv = one_kv;
  kvmeld::compressor one_meld(one_kv, policy, budget), two_meld(two_kv, policy, budget);
  const index_t cycle = std::max(budget.trigger_length() - budget.slots, 1);
  bench::versus(
      state, ratio,
      [&] {
        two_meld.step(two_kv.heads(0, 0), {q, k, v}, out, two);
      },
      [&] {
        one_meld.step(one_kv.heads(0, 0), {q, k, v}, out);
      },
      bench::nothing{}, cycle);
}

template <class Policy>
void compress(benchmark::State& state, const Policy& policy) {
  const auto tokens = static_cast<index_t>(state.range(0)), heads = index_t{8};
  const kvmeld::budget budget{.slots = tokens / 10};
  const auto full = filled(heads, group, tokens, tokens);
  const auto queries = bench::gaussian(size(tokens) * size(heads * group * dim), 99);
  auto one_kv = full, two_kv = full;
  kvmeld::compressor one_meld(one_kv, policy, budget), two_meld(two_kv, policy, budget);
  const auto work = [&](auto& meld, auto& kv, const auto& run) {
    meld.prompt(kv.heads(0, 0), kvmeld::queries(queries, tokens, kv.spec()), run);
    meld.end_prompt(0, run);
  };
  bench::versus(
      state, ratio, [&] { work(two_meld, two_kv, two); },
      [&] { work(one_meld, one_kv, kvmeld::serial{}); },
      [&] {
        one_meld.clear(0), two_meld.clear(0);
        one_kv = full, two_kv = full;
      });
}

benchmark::internal::Benchmark* by_the_wall(benchmark::internal::Benchmark* b) {
  return b->UseManualTime()->Iterations(bench::pairs)->Unit(benchmark::kMillisecond);
}

template <class... Policies>
void add(const Policies&... policies) {
  const auto each = [](const auto& policy) {
    using P = std::remove_cvref_t<decltype(policy)>;
    const std::string name(policy.name());
    by_the_wall(benchmark::RegisterBenchmark(("threads/step/" + name + "/f32").c_str(),
                                             [policy](benchmark::State& s) { step<P>(s, policy); })
                    ->ArgName("slots")
                    ->Arg(1024)
                    ->Arg(4096));
    by_the_wall(
        benchmark::RegisterBenchmark(("threads/compress/" + name + "/f32").c_str(),
                                     [policy](benchmark::State& s) { compress<P>(s, policy); })
            ->ArgName("tokens")
            ->Arg(4096));
  };
  (each(policies), ...);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace kvmeld;
  bench::take_pairs(argc, argv);
  by_the_wall(benchmark::RegisterBenchmark("threads/read/f32", read));
  add(h2o{}, snapkv{}, zsmerge{}, keepkv{}, fold{});
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 2;
  }
  benchmark::RunSpecifiedBenchmarks();
}
