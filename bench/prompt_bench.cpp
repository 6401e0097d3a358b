// SPDX-License-Identifier: MIT
/// A prompt's column sums for one head, against the plain product Q Kᵀ of the same shape.
#include <Eigen/Core>
#include <algorithm>
#include <cmath>

#include "kvmeld/kvmeld.hpp"
#include "peak_memory.hpp"
#include "spec.hpp"
#include "versus.hpp"

namespace {

using kvmeld::index_t;
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// What the causal products take without anything else: blocks of queries on the keys that they
/// see. `use(logits [rows, visible], first query)`.
constexpr index_t queries_a_block = 64, keys_a_tile = 512;
template <class Use>
void causal_products(const Eigen::Map<const matrix>& q, const Eigen::Map<const matrix>& k,
                     matrix& logits, Use use) {
  const auto n = static_cast<index_t>(q.rows());
  logits.resize(queries_a_block, n);
  for (index_t begin = 0; begin < n; begin += queries_a_block) {
    const index_t rows = std::min(queries_a_block, n - begin), visible = begin + rows;
    for (index_t first = 0; first < visible; first += keys_a_tile) {
      const index_t width = std::min(keys_a_tile, visible - first);
      logits.block(0, first, rows, width).noalias() =
          q.middleRows(begin, rows) * k.middleRows(first, width).transpose();
    }
    use(logits.topLeftCorner(rows, visible), begin);
  }
}

/// A head's queries and keys, and the baseline's room.
struct scene {
  explicit scene(const benchmark::State& state)
      : n(static_cast<index_t>(state.range(0))),
        dim(static_cast<index_t>(state.range(1))),
        queries(bench::gaussian(size(n) * size(dim), 1)),
        keys(bench::gaussian(size(n) * size(dim), 2)),
        kv(bench::spec(1, 1, dim), {.capacity = n}),
        q(queries.data(), n, dim),
        k(keys.data(), n, dim),
        product(n, n) {
    kv.append(kv.heads(0, 0), keys, keys, n);
  }
  static std::size_t size(index_t x) { return static_cast<std::size_t>(x); }

  auto gemm() {
    return [this] {
      product.noalias() = q * k.transpose();
      benchmark::DoNotOptimize(product.data());
    };
  }
  /// What an attention kernel stores for each query.
  std::vector<float> log_sum_exp() {
    std::vector<float> out(size(n));
    causal_products(q, k, logits, [&](const auto& block, index_t begin) {
      for (Eigen::Index r = 0; r < block.rows(); ++r) {
        const auto row = block.row(r).head(begin + r + 1).array() * kv.head(0).scale();
        const float most = row.maxCoeff();
        out[static_cast<std::size_t>(begin + r)] = most + std::log((row - most).exp().sum());
      }
    });
    return out;
  }

  index_t n, dim;
  std::vector<float> queries, keys;
  kvmeld::cache kv;
  Eigen::Map<const matrix> q, k;
  matrix product, logits;
};

struct wanted {
  bool window_and_decayed;  ///< in the same pass as the total
  bool given_log_sum_exp;
};

void column_scores(benchmark::State& state, wanted what) {
  scene s(state);
  const std::size_t n = scene::size(s.n), more = what.window_and_decayed ? n : 0;
  std::vector<float> total(n), window(more), decayed(more);
  const auto log_sum_exp = what.given_log_sum_exp ? s.log_sum_exp() : std::vector<float>();
  auto queries = kvmeld::prompt_queries(s.queries.data(), s.n, 1, 1, s.dim);
  queries.log_sum_exp = what.given_log_sum_exp ? log_sum_exp.data() : nullptr;
  const auto work = [&] {
    kvmeld::column_scores(s.kv.head(0), queries, {.window = 32, .decay = 0.98F},
                          {.total = total, .window = window, .decayed = decayed});
    benchmark::DoNotOptimize(total.data());
  };
  const auto peak = bench::peak_bytes(work);
  bench::versus(state, "vs_gemm", work, s.gemm());
  state.counters["bytes_per_token"] = static_cast<double>(peak) / s.n;
}

/// The floor: half of the plain product, in blocks.
void products(benchmark::State& state) {
  scene s(state);
  bench::versus(
      state, "vs_gemm",
      [&] {
        causal_products(s.q, s.k, s.logits,
                        [](const auto& block, index_t) { benchmark::DoNotOptimize(block.data()); });
      },
      s.gemm());
}

void sizes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"tokens", "dim"})
      ->ArgsProduct({{1024, 2048, 4096, 8192, 16384}, {128}})
      ->UseManualTime()
      ->Iterations(bench::pairs)
      ->Unit(benchmark::kMillisecond);
}

void add(const char* name, wanted what) {
  sizes(benchmark::RegisterBenchmark(
      name, [what](benchmark::State& state) { column_scores(state, what); }));
}

}  // namespace

int main(int argc, char** argv) {
  bench::take_pairs(argc, argv);
  sizes(benchmark::RegisterBenchmark("causal_products/f32", products));
  add("column_scores/total/f32", {.window_and_decayed = false, .given_log_sum_exp = false});
  add("column_scores/all/f32", {.window_and_decayed = true, .given_log_sum_exp = false});
  add("column_scores/given_log_sum_exp/f32",
      {.window_and_decayed = false, .given_log_sum_exp = true});
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 2;
  }
  benchmark::RunSpecifiedBenchmarks();
}
