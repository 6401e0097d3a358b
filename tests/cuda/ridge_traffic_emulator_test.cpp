// SPDX-License-Identifier: MIT
// What a ridge moves, as the emulator counts it, beside the least that its tiles are: every operand
// once a product, results once, sectors whole, no two lanes at one bank.
#include <catch2/catch.hpp>

#include "cuda/ridge_memory.hpp"

namespace kvmeld::cuda {
namespace ridge_traffic_emulator_test {

using emulator::traffic;

/// Bytes of each of the system's arrays, and of 16 × 8 × 16 products.
struct moved {
  double rows_loaded = 0, rows_stored = 0, tiles_loaded = 0, tiles_stored = 0;
  double inverse_loaded = 0, inverse_stored = 0, solution_loaded = 0, solution_stored = 0;
  double mmas = 0;
};

/// One head.
moved least(index_t n, index_t dim, index_t queries, index_t halves) {
  const index_t unknowns = (n + 127) / 128, of_queries = (queries + 127) / 128;
  const bool dual = of_queries < unknowns;
  const index_t t = std::min(unknowns, of_queries), dims = (dim + 127) / 128,
                columns = (dim + 31) / 32;
  const double tile = 4.0 * 128 * 128, depth = dual ? 128 * of_queries : (queries + 63) / 64 * 64;
  const double deep = dual ? 128 * unknowns : depth;  // of the matrix's products
  const double operand = 2.0 * halves * 128 * deep, split = halves == 2 ? 3 : 1;
  moved m;
  m.rows_stored = dual ? 0 : dims * operand;
  for (index_t i = 0; i < t + dims; ++i) {
    for (index_t j = 0; j < std::min(i + 1, t); ++j) {
      if (i < t || !dual) {
        m.rows_loaded += (i == j ? 1 : 2) * operand;
        m.mmas += split * 128 * deep / 16;
      }
      m.tiles_stored += tile;                                // the sums
      m.tiles_loaded += tile + j * (i == j ? 1 : 2) * tile;  // and the columns before
      m.mmas += 3.0 * 1024 * j;
      if (i == j) {
        m.inverse_stored += tile;
      } else {  // what is left of it, then divided by the diagonal's
        m.tiles_stored += 2 * tile, m.tiles_loaded += tile;
        m.inverse_loaded += tile, m.mmas += 3.0 * 1024;
      }
    }
  }
  for (index_t j = 0; j < t; ++j) {  // back, 32 columns at a time
    m.tiles_loaded += columns * (t - 1 - j) * tile + columns * tile / 4;
    m.inverse_loaded += columns * tile;
    m.solution_stored += columns * tile / 4;
    m.solution_loaded += columns * std::max(t - 2 - j, 0) * tile / 4;
    m.mmas += 3.0 * 256 * columns * (t - j);
  }
  if (dual) {  // times Pᵀ
    m.rows_loaded += unknowns * dims * 2.0 * halves * 128 * depth;
    m.solution_loaded += unknowns * dims * 4.0 * 128 * depth;
    m.mmas += unknowns * dims * (halves + 1) * 128 * depth / 16;
  }
  return m;
}

void check_traffic(index_t n, index_t dim, index_t queries, index_t halves) {
  INFO("unknowns " << n << ", dim " << dim << ", queries " << queries << ", halves " << halves);
  ridge_memory kept({n}, dim, queries, halves);
  for (index_t q = 0; q < queries; ++q) {
    kept.put_missing(0, q, 0, 1);
    kept.squares[q % 3] += 1;
  }
  for (index_t u = 0; u < (n + 127) / 128 * 128; ++u) {
    for (index_t q = 0; q < kept.system.depth; ++q) {
      kept.put(0, u, q, u < n && q < queries ? 1.0 / n : 0.0);
    }
  }
  const stream launches = order();
  traffic counted;
  const auto& s = kept.system;
  const auto bytes = [](const void* from, const void* to) {
    return static_cast<std::size_t>(static_cast<const char*>(to) - static_cast<const char*>(from));
  };
  counted.watch(s.rows, bytes(s.rows, s.data));
  counted.watch(s.data, bytes(s.data, s.inverse));
  counted.watch(s.inverse, bytes(s.inverse, s.solution));
  counted.watch(s.solution, bytes(s.solution, s.scale));
  kept.solve(0.002F, launches);
  const moved m = least(n, dim, queries, halves);
  const double loaded[] = {m.rows_loaded, m.tiles_loaded, m.inverse_loaded, m.solution_loaded};
  const double stored[] = {m.rows_stored, m.tiles_stored, m.inverse_stored, m.solution_stored};
  for (std::size_t i = 0; i < 4; ++i) {
    INFO("array " << i);
    const auto& of = counted.of(i);
    CHECK(static_cast<double>(of.loaded.bytes) <= loaded[i]);
    CHECK(static_cast<double>(of.stored.bytes) <= stored[i]);
    CHECK(32 * of.loaded.sectors <= of.loaded.bytes);
    CHECK(32 * of.stored.sectors <= of.stored.bytes);
  }
  CHECK(static_cast<double>(counted.mmas) <= m.mmas);
  CHECK(counted.bank_conflicts == 0);
}

TEST_CASE("a ridge reads each tile once a product, sectors whole, without bank conflicts") {
  check_traffic(260, 33, 260, 1);
  check_traffic(140, 160, 130, 2);
  check_traffic(260, 33, 64, 2);  // the dual
  check_traffic(260, 160, 130, 1);
}

}  // namespace ridge_traffic_emulator_test
}  // namespace kvmeld::cuda
