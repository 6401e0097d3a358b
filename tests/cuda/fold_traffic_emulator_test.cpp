// What fold's fit of values moves, as the emulator counts it, beside the least that there is to
// move.
#include <catch2/catch.hpp>

#include "cuda/device_cache.hpp"
#include "kvfold/cuda/policies/fold/values.cuh"

namespace kvfold::cuda {
namespace {

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

/// Reference queries, each with a log-sum-exp, and where their outputs go.
struct reference_case {
  device_cache<half> kv;
  index_t all;
  device_buffer<half> q;
  device_buffer<index_t> planned;
  device_buffer<float> log_sum_exp, out;

  reference_case(const cache_case& c, index_t count)
      : kv(c, std::vector<index_t>(static_cast<std::size_t>(c.heads), c.capacity), 3),
        all(c.group * count),
        q(static_cast<std::size_t>(c.heads * all * c.dim), 0),
        planned(static_cast<std::size_t>(c.heads), 0),
        log_sum_exp(static_cast<std::size_t>(c.heads * all), 0),
        out(q.size()) {}
  detail::chosen_rows<half> queries(index_t count, index_t dim) {
    return {{q.data(), count, std::ptrdiff_t{all} * dim, std::ptrdiff_t{count} * dim, dim},
            q.data(),
            count,
            planned.data()};
  }
};

void check_outputs(const cache_case& c, index_t count) {
  INFO("dim " << c.dim << ", group " << c.group << ", queries " << count);
  reference_case r(c, count);
  const stream launches = order();
  traffic counted;
  counted.watch(r.kv.keys.data(), r.kv.keys.size() * sizeof(half));
  counted.watch(r.kv.values.data(), r.kv.values.size() * sizeof(half));
  counted.watch(r.q.data(), r.q.size() * sizeof(half));
  counted.watch(r.out.data(), r.out.size() * sizeof(float));
  detail::outputs_of(r.kv.view(), r.queries(count, c.dim), r.log_sum_exp.data(), r.out.data(),
                     launches);
  // 64 queries at a time; of V's columns 128 at a time, for which K is read again.
  const double blocks = ceiling(r.all, 64), columns = ceiling(c.dim, 128);
  CHECK(rows_of(counted.of(0), c.dim) <= c.heads * blocks * columns * c.capacity);
  CHECK(rows_of(counted.of(1), c.dim) <= c.heads * blocks * c.capacity);
  CHECK(rows_of(counted.of(2), c.dim) <= c.heads * columns * r.all);
  CHECK(counted.of(3).stored.bytes == static_cast<std::int64_t>(r.out.size() * sizeof(float)));
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(whole_sectors(counted.of(i)));
  }
  CHECK(counted.bank_conflicts == 0);
  // K in one product for every 128 columns of V, V in two.
  const double tiles = blocks * 4 * ceiling(c.capacity, 64) * 8;  // of 16 queries, 8 slots
  CHECK(static_cast<double>(counted.mmas) <= c.heads * tiles * (c.dim / 16) * (columns + 2));
  // One a tile, two when a block begins.
  CHECK(static_cast<double>(counted.barriers) <=
        c.heads * blocks * columns * (ceiling(c.capacity, 64) + 2));
}

TEST_CASE("reference outputs read K and V once for 64 queries") {
  check_outputs({.heads = 2, .capacity = 150, .dim = 128, .group = 2}, 40);
  check_outputs({.heads = 1, .capacity = 64, .dim = 160, .group = 1}, 30);
}

}  // namespace
}  // namespace kvfold::cuda
