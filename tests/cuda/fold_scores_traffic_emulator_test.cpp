// SPDX-License-Identifier: MIT
// What a prompt's scores for fold move, as the emulator counts it, beside the least that there is
// to move.
#include <catch2/catch.hpp>

#include "cuda/row_traffic.hpp"
#include "kvmeld/cuda/policies/fold/memory.cuh"

namespace kvmeld::cuda {
namespace fold_scores_traffic_emulator_test {

/// Of a warp's products: 32 rows by tiles of 128 columns, each in steps of 16 by 8 by 16.
double products(index_t rows, index_t columns, index_t dim) {
  return static_cast<double>(2 * ceiling(rows, 32) * 16 * ceiling(columns, 128) * (dim / 16));
}

void check_scores(const cache_case& c) {
  const index_t n = c.capacity;
  INFO("dim " << c.dim << ", group " << c.group << ", tokens " << n);
  fold_rule rule;
  rule.by_scores = true;
  device_cache<half> kv(c, std::vector<index_t>(static_cast<std::size_t>(c.heads), n), 3,
                        {slot_reduce::sum, slot_reduce::max},
                        static_cast<index_t>(rule.memory(c.dim, c.group, n)));
  device_buffer<half> q(static_cast<std::size_t>(c.heads * c.group * n * c.dim), 0);
  const std::ptrdiff_t member = std::ptrdiff_t{n} * c.dim;
  const query_rows<half> asked{q.data(), n, c.group * member, member, c.dim};
  detail::score_scratch work{};
  const auto shape = detail::shape_of(kv.view(), n);
  workspace_allocator count;
  work.allocate(count, shape);
  device_buffer<unsigned char> memory(count.used());
  workspace_allocator from({memory.data(), memory.size()});
  work.allocate(from, shape);

  const stream launches = order();
  std::int64_t conflicts = 0, mmas = 0;  // leverage's, not of the passes over queries
  {
    const emulator::traffic counted;
    detail::leverage_of_keys(kv.view(), kv.state, rule, budget{.slots = 0}, false, nullptr,
                             work.planned, work.leverage, launches);
    conflicts = counted.bank_conflicts, mmas = counted.mmas;
  }
  row_traffic counted(kv, &q);
  constexpr std::size_t moved = 3;
  counted.watch(work.moved, q.size() * sizeof(half));
  detail::score_prompt(rule, kv.view(), kv.state, asked, work, launches);

  // The first reading goes by the mask, a moved query sees everything. Rows stay in registers, 256
  // of them, while columns stream by: queries of the group in one line; slots of each member alone.
  const detail::grouped_queries line{n, c.group}, alone{n, 1};
  const index_t parts = detail::column_parts(c.heads, line.size(), n);
  const index_t query_parts = detail::column_parts(c.heads, n, alone.size());
  double keys = 0, first = 0;
  for (index_t r = 0; r < line.size(); r += 256) {
    const index_t end = std::min(line.size(), r + 256),
                  sees = std::min(n, 16 * ceiling(end, 16 * c.group));
    keys += std::min(n, 128 * ceiling(sees, 128)) + n;
    first += products(end - r, sees, c.dim);
  }
  keys += c.group * n * query_parts;
  const double queries = c.group * n;
  CHECK(counted.loaded(row_traffic::keys) / (c.heads * keys) <= 1);
  CHECK(counted.loaded(row_traffic::values) / (c.heads * n) <= 1);
  CHECK(counted.loaded(row_traffic::queries) / (c.heads * queries * parts) <= 1);
  CHECK(static_cast<double>(counted.of(moved).loaded.bytes) / (2.0 * c.dim) /
            (c.heads * queries * (parts + ceiling(n, 256))) <=
        1);
  for (const auto plane : {row_traffic::keys, row_traffic::values, row_traffic::queries}) {
    CHECK(counted.sectors(plane) <= 1);
    CHECK(counted.stored(plane) == 0);
  }
  CHECK(counted.bank_conflicts == conflicts);
  CHECK(static_cast<double>(counted.mmas - mmas) /
            (c.heads * (first + products(line.size(), n, c.dim) +
                        c.group * products(n, alone.size(), c.dim))) <=
        1);
  // Leverage takes four, each pass over columns that is split one more.
  CHECK(counted.launches == 10 + c.group + (parts > 1 ? 2 : 0) + (query_parts > 1 ? c.group : 0));
  CHECK(memory.intact());
}

TEST_CASE(
    "a prompt's scores read K once for 256 queries, three times, V once, and keep no square") {
  check_scores({.heads = 2, .capacity = 512, .dim = 128, .group = 1});
  check_scores({.heads = 1, .capacity = 300, .dim = 64, .group = 4});
}

}  // namespace fold_scores_traffic_emulator_test
}  // namespace kvmeld::cuda
