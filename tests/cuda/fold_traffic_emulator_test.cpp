// SPDX-License-Identifier: MIT
// What fold's fit of values moves, as the emulator counts it, beside the least that there is to
// move.
#include <catch2/catch.hpp>

#include "cuda/fold_rows.hpp"

namespace kvmeld::cuda {
namespace fold_traffic_emulator_test {

using emulator::traffic;

index_t ceiling(index_t n, index_t of) { return (n + of - 1) / of; }

/// Loads of an array of rows of so many bytes, in rows.
double rows_of(const traffic::watched& array, index_t dim) {
  return static_cast<double>(array.loaded.bytes) / (2.0 * dim);
}
bool whole_sectors(const traffic::watched& array) {
  return 32 * (array.loaded.sectors + array.stored.sectors) <=
         array.loaded.bytes + array.stored.bytes;
}

/// Of a lane's products: 16 rows with 8 others, 16 elements each.
double products(index_t rows, index_t columns, index_t dim) {
  return static_cast<double>(ceiling(rows, 16) * ceiling(columns, 8) * ceiling(dim, 16));
}

/// A head that has a plan, and one that has none.
struct fold_case {
  cache_case c;
  device_cache<half> kv;
  asked_queries<half> asked;
  planned_rows<half> plan;
  device_buffer<float> lse;
  index_t all, unknowns = 0;

  fold_case(const cache_case& of, index_t count, index_t rows)
      : c(of),
        kv(c, std::vector(static_cast<std::size_t>(c.heads), c.capacity), 3),
        asked(c, count, {0, -1}, 4),
        plan(c, asked.all(), rows, 5),
        lse(static_cast<std::size_t>(c.heads * asked.all()), 0),
        all(asked.all()) {
    for (index_t r = 0; r < rows; ++r) {
      unknowns += plan.pinned(r) ? 0 : 1;
    }
  }
  void fit_masses(stream stream) {
    detail::fit_masses(kv.view(), plan.view(), plan.into.data(), asked.rows(), plan.sum.data(),
                       plan.mass.data(), lse.data(), plan.work, stream);
  }
};

void check_outputs(const cache_case& c, index_t count) {
  INFO("dim " << c.dim << ", group " << c.group << ", queries " << count);
  fold_case f(c, count, 1);
  device_buffer<float> out(static_cast<std::size_t>(c.heads * f.all * c.dim), 0);
  const stream launches = order();
  traffic counted;
  counted.watch(f.kv.keys.data(), f.kv.keys.size() * sizeof(half));
  counted.watch(f.kv.values.data(), f.kv.values.size() * sizeof(half));
  counted.watch(f.asked.q.data(), f.asked.q.size() * sizeof(half));
  counted.watch(out.data(), out.size() * sizeof(float));
  detail::outputs_of(f.kv.view(), f.asked.rows(), f.lse.data(), out.data(), launches);
  // 64 queries at a time; of V's columns 128 at a time, for which K is read again.
  const index_t blocks = ceiling(f.all, 64), columns = ceiling(c.dim, 128);
  CHECK(rows_of(counted.of(0), c.dim) <= blocks * columns * c.capacity);
  CHECK(rows_of(counted.of(1), c.dim) <= blocks * c.capacity);
  CHECK(rows_of(counted.of(2), c.dim) <= columns * f.all);
  CHECK(counted.of(3).stored.bytes <= 4 * f.all * c.dim);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(whole_sectors(counted.of(i)));
  }
  CHECK(counted.bank_conflicts == 0);
  // K in one product for every 128 columns of V, V in two.
  CHECK(static_cast<double>(counted.mmas) <=
        products(64 * blocks, 64 * ceiling(c.capacity, 64), c.dim) * (columns + 2));
  // One a tile, two when a block begins.
  CHECK(counted.barriers <= blocks * columns * (ceiling(c.capacity, 64) + 2));
}

void check_rows(const cache_case& c, index_t count, index_t rows) {
  INFO("dim " << c.dim << ", group " << c.group << ", queries " << count << ", rows " << rows);
  fold_case f(c, count, rows);
  const auto& work = f.plan.work;
  const auto of_rows = 4 * static_cast<std::size_t>(c.heads * rows * c.dim);
  const index_t columns = ceiling(c.dim, 128);
  {
    const stream launches = order();
    traffic counted;
    counted.watch(f.asked.q.data(), f.asked.q.size() * sizeof(half));
    counted.watch(work.rows.key, of_rows);
    f.fit_masses(launches);
    const index_t blocks = ceiling(f.unknowns, 64), some = c.dim <= 128 ? 64 : 32;
    CHECK(rows_of(counted.of(0), c.dim) <= blocks * f.all);
    CHECK(rows_of(counted.of(1), 2 * c.dim) <= f.unknowns);  // in two parts
    CHECK(whole_sectors(counted.of(0)));
    CHECK(whole_sectors(counted.of(1)));
    CHECK(counted.bank_conflicts == 0);
    CHECK(static_cast<double>(counted.mmas) <=
          2 * products(64 * blocks, some * ceiling(f.all, some), c.dim));
  }
  {
    const stream launches = order();
    traffic counted;
    counted.watch(f.asked.q.data(), f.asked.q.size() * sizeof(half));
    counted.watch(work.rows.key, of_rows);
    counted.watch(work.rows.value, of_rows);
    counted.watch(work.system.rows, 2 * static_cast<std::size_t>(work.system.low()));
    detail::probabilities_of<half, 1>(f.kv.view(), f.plan.view(), f.asked.rows(), work.system, work,
                                      launches);
    // Keys for the log-sum-exp and for the weights.
    const index_t blocks = ceiling(f.all, 64);
    CHECK(rows_of(counted.of(0), c.dim) <= columns * f.all);
    CHECK(rows_of(counted.of(1), 2 * c.dim) <= 2 * blocks * columns * rows);
    CHECK(rows_of(counted.of(2), 2 * c.dim) <= blocks * rows);
    CHECK(counted.of(3).stored.bytes <= 2 * 128 * ceiling(f.unknowns, 128) * 64 * blocks);
    for (std::size_t i = 0; i < 4; ++i) {
      CHECK(whole_sectors(counted.of(i)));
    }
    CHECK(counted.bank_conflicts == 0);
    // Two parts of keys twice; weights and values in three products.
    const index_t tiles = 32 * ceiling(rows, 32);
    CHECK(static_cast<double>(counted.mmas) <= products(64 * blocks, tiles, c.dim) * 4 * columns +
                                                   3 * products(64 * blocks, tiles, 128 * columns));
    // One a tile of each pass, two when a block begins, four for its numbers.
    CHECK(counted.barriers <= blocks * columns * (2 * ceiling(rows, 32) + 6));
  }
}

TEST_CASE("reference outputs read K and V once for 64 queries") {
  check_outputs({.heads = 2, .capacity = 150, .dim = 128, .group = 2}, 40);
  check_outputs({.heads = 2, .capacity = 64, .dim = 160}, 30);
}

TEST_CASE("fits of a plan's rows read queries once for 64 rows, and rows twice for 64 queries") {
  check_rows({.heads = 2, .capacity = 150, .dim = 128, .group = 2}, 40, 80);
  check_rows({.heads = 2, .capacity = 64, .dim = 160}, 30, 33);
}

}  // namespace fold_traffic_emulator_test
}  // namespace kvmeld::cuda
