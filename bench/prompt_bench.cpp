/// A prompt's column sums for one head, against the plain product Q Kᵀ of the same shape.
#include <Eigen/Core>

#include "kvfold/kvfold.hpp"
#include "versus.hpp"

namespace {

using kvfold::index_t;
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// `all`: total, window and decayed sums in one pass; otherwise the total alone.
void column_scores(benchmark::State& state, bool all) {
  const auto n = static_cast<index_t>(state.range(0)), dim = static_cast<index_t>(state.range(1));
  const auto rows = static_cast<std::size_t>(n);
  const auto queries = bench::gaussian(rows * static_cast<std::size_t>(dim), 1);
  const auto keys = bench::gaussian(rows * static_cast<std::size_t>(dim), 2);
  kvfold::cache<float> kv({.heads = 1, .dim = dim, .capacity = n});
  kv.append(0, keys, keys);
  std::vector<float> total(rows), window(all ? rows : 0), decayed(all ? rows : 0);

  const Eigen::Map<const matrix> q(queries.data(), n, dim), k(keys.data(), n, dim);
  matrix product(n, n);
  bench::versus(
      state, "vs_gemm",
      [&] {
        kvfold::column_scores(kv.head(0), kvfold::prompt_queries(queries.data(), n, 1, 1, dim),
                              {.window = 32, .decay = 0.98F},
                              {.total = total, .window = window, .decayed = decayed});
        benchmark::DoNotOptimize(total.data());
      },
      [&] {
        product.noalias() = q * k.transpose();
        benchmark::DoNotOptimize(product.data());
      });
}

void sizes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"tokens", "dim"})
      ->ArgsProduct({{1024, 2048, 4096, 8192}, {128}})
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(column_scores, total, false)->Name("column_scores/total/f32")->Apply(sizes);
BENCHMARK_CAPTURE(column_scores, all, true)->Name("column_scores/all/f32")->Apply(sizes);

}  // namespace

BENCHMARK_MAIN();
