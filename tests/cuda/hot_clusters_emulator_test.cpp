// SPDX-License-Identifier: MIT
// What clusters move, as the emulator counts it, beside the least that there is to move, as
// hot_kernels_emulator_test.cpp does.
#include <algorithm>
#include <catch2/catch.hpp>

#include "cuda/chance.hpp"
#include "cuda/device_cache.hpp"
#include "kvmeld/cuda/policies/fold/points.cuh"
#include "kvmeld/cuda/search/clusters.cuh"

namespace kvmeld::cuda {
namespace hot_clusters_emulator_test {

using emulator::traffic;

index_t ceiling(index_t n, index_t of) { return (n + of - 1) / of; }
double sectors(const traffic::moved& x) {
  return static_cast<double>(32 * x.sectors) / static_cast<double>(x.bytes);
}

/// A head of `slots` points, the first `pinned` of which are pinned.
struct scene {
  index_t slots, pinned, depth;
  std::size_t n = static_cast<std::size_t>(slots), numbers = n * static_cast<std::size_t>(depth);
  device_buffer<half> points{numbers, 0}, means{numbers, 0};
  device_buffer<float> square{n, 0}, mean_square{n, 0}, weight{n, 0}, gain{n, 0}, similarity{n, 0};
  device_buffer<index_t> kept{n}, removed{n}, into{n, 0xff}, nearest{n, 0}, seeds{n}, members{n},
      spare{n}, by_slot{n}, begin{n + 1};
  device_buffer<index_t> rows{std::vector<index_t>{0}}, length{std::vector{slots}},
      kept_count{std::vector{pinned}}, removed_count{std::vector{slots - pinned}};

  scene(index_t all, index_t pins, index_t dim)
      : slots(all), pinned(pins), depth(detail::point_rows::depth_of(dim)) {
    for (index_t s = 0; s < slots; ++s) {
      s < pinned ? kept[s] = s : removed[s - pinned] = s;
      weight[s] = 1, gain[s] = static_cast<float>(s % 97), members[s] = s, begin[s] = 3 * s;
      seeds[s] = slots - 1 - s;
    }
  }
  detail::clustered_points x() {
    return {{points.data(), square.data(), slots, depth},
            weight.data(),
            {rows.data(),
             kept.data(),
             removed.data(),
             kept_count.data(),
             removed_count.data(),
             into.data(),
             {nearest.data(), similarity.data()},
             nullptr},
            {nullptr}};
  }
  detail::point_rows centres() { return {means.data(), mean_square.data(), slots, depth}; }
  detail::cluster_scratch work() {
    return {centres(), members.data(), spare.data(), by_slot.data(), begin.data()};
  }
  detail::seed_lists of_seeds(index_t target) {
    return {seeds.data(), gain.data(), head_budgets({.slots = target})};
  }
  /// Rows of points, or of means, that were moved.
  double rows_of(std::int64_t bytes) const { return static_cast<double>(bytes) / (2.0 * depth); }
  void watch(traffic& counted) {
    counted.watch(points.data(), numbers * sizeof(half));
    counted.watch(means.data(), numbers * sizeof(half));
  }
};

template <index_t Depth, index_t Rows = 128>
void check_nearest(index_t slots, index_t count, index_t dim) {
  INFO("dim " << dim << ", " << slots << " slots, " << count << " centres, " << Rows << " a block");
  using kernel = detail::nearest_centre<Depth, Rows>;
  scene s(slots, count, dim);
  const index_t size = slots - count, blocks = ceiling(size, Rows);
  const index_t tiles = ceiling(count, 128 * 128 / Rows), deep = Rows / 2;
  const index_t which = GENERATE(detail::met_centres::means, detail::met_centres::pinned);
  const kernel nearest{s.x(), {s.centres(), s.of_seeds(slots), which}};
  traffic counted;
  s.watch(counted);
  launch(nearest, {1, static_cast<unsigned>(ceiling(slots, kernel::rows))}, order());
  const bool of_means = which == detail::met_centres::means;
  const double points = size + (of_means ? 0 : blocks * count);
  CHECK(s.rows_of(counted.of(0).loaded.bytes) / points <= 1);
  CHECK(s.rows_of(counted.of(1).loaded.bytes) <= (of_means ? blocks * count : 0));
  for (const std::size_t array : {std::size_t{0}, std::size_t{1}}) {
    CHECK(counted.of(array).stored.bytes == 0);
    CHECK((counted.of(array).loaded.bytes == 0 || sectors(counted.of(array).loaded) <= 1));
  }
  CHECK(counted.bank_conflicts == 0);
  CHECK(static_cast<double>(counted.mmas) / (blocks * tiles * 8 * s.depth) <= 1);
  CHECK(counted.barriers <= blocks * (tiles * s.depth / deep + 2));  // one a part of a tile
}

TEST_CASE("the nearest centre reads points once, centres once for a block's points") {
  check_nearest<256>(500, 130, 128);
  check_nearest<512>(200, 60, 160);
  check_nearest<512, 64>(400, 300, 160);
  check_nearest<256>(300, 40, 48);
}

TEMPLATE_TEST_CASE("a pick reads the rows of its pool once for each half of it", "",
                   detail::pick_seeds<>, detail::pick_seeds<detail::pick_seeds<>::few>) {
  const index_t slots = GENERATE(700, 200), dim = slots == 700 ? 128 : 40, pinned = 20;
  scene s(slots, pinned, dim);
  const index_t pool = std::min(slots - pinned, index_t{256});
  traffic counted;
  s.watch(counted);
  launch(TestType{s.x(), s.of_seeds(pinned + 50), s.centres(), 0}, {1}, order());
  CHECK(s.rows_of(counted.of(0).loaded.bytes) / (2 * pool) <= 1);
  CHECK(sectors(counted.of(0).loaded) <= 1);
  CHECK(counted.of(0).stored.bytes == 0);
  // Of rows that lie outside of shared memory one a seed.
  CHECK(counted.of(1).loaded.bytes <= (TestType::roomy ? 0 : 50 * 2 * TestType::pool));
  // The radix select's histogram is read 8 bins a lane, four times; a seed's place and slot alone.
  CHECK(counted.bank_conflicts <= 4 * 8 * 7 + 2 * 50);
  CHECK(counted.mmas <= 32 * s.depth);
  // One a part of 32, four a digit of the select and one at its end, one a stretch of 512 slots.
  CHECK(counted.barriers <= 2 * s.depth / 32 + 4 * 4 + ceiling(slots, 512) + 6);
}

/// What clusters of random points come to: the seeds in order, where each slot goes, the means.
template <index_t Depth>
std::vector<std::vector<index_t>> clusters_of(index_t slots, index_t dim) {
  scene s(slots, 20, dim);
  emulator::chance random{7};
  for (index_t i = 0; i < slots; ++i) {
    float square = 0;
    for (index_t j = 0; j < s.depth; ++j) {
      const auto x = static_cast<float>(random.below(9));
      s.points[std::ptrdiff_t{i} * s.depth + j] = from_float<half>(x);
      square += x * x;
    }
    s.square[i] = square;
  }
  detail::cluster_points<Depth>(s.x(), s.length.data(), s.of_seeds(20 + 60), s.work(), 2, 1,
                                order());
  std::vector<std::vector<index_t>> all(3);
  for (index_t e = 0; e < s.kept_count[0]; ++e) {
    all[0].push_back(s.kept[e]);
    all[2].push_back(static_cast<index_t>(s.mean_square[e]));
  }
  for (index_t e = 0; e < s.removed_count[0]; ++e) {
    all[1].push_back(s.nearest[e]);
  }
  return all;
}

TEST_CASE("clusters are the same on cards that give a block less shared memory") {
  const auto of_128 = clusters_of<256>(420, 128), of_160 = clusters_of<512>(300, 160);
  const emulator::small_card card;
  CHECK(clusters_of<256>(420, 128) == of_128);
  CHECK(clusters_of<512>(300, 160) == of_160);
}

TEST_CASE("means read their members once and are written once") {
  const index_t slots = GENERATE(600, 300), dim = slots == 600 ? 128 : 64, count = slots / 3;
  scene s(slots, count, dim);
  traffic counted;
  s.watch(counted);
  launch(detail::mean_centres{s.x(), s.work(), true}, {1, 3}, order());
  CHECK(s.rows_of(counted.of(0).loaded.bytes) / slots <= 1);
  CHECK(s.rows_of(counted.of(1).stored.bytes) / count <= 1);
  CHECK(sectors(counted.of(0).loaded) <= 1);
  CHECK(sectors(counted.of(1).stored) <= 1);
  CHECK(counted.bank_conflicts == 0);
}

TEMPLATE_TEST_CASE("points are made of keys and values read once, and written once", "",
                   (std::integral_constant<index_t, 128>), (std::integral_constant<index_t, 256>)) {
  const index_t dim = TestType::value == 256 ? 160 : GENERATE(128, 64);
  const index_t slots = dim == 128 ? 200 : dim == 160 ? 150 : 100;
  device_cache<half> kv({.heads = 1, .capacity = slots, .dim = dim}, {slots}, 3);
  scene s(slots, 0, dim);
  const auto d = static_cast<std::size_t>(dim);
  device_buffer<float> offset(d, 0), inverse(1, 0);
  device_buffer<half> factor(2 * d * d, 0);
  const auto bytes = kv.keys.size() * sizeof(half);
  traffic counted;
  s.watch(counted);
  counted.watch(kv.keys.data(), bytes), counted.watch(kv.values.data(), bytes);
  using kernel = detail::make_points<half, TestType::value>;
  launch(kernel{kv.view(),
                s.rows.data(),
                {nullptr, factor.data(), offset.data(), inverse.data(), s.weight.data()},
                s.x().points,
                kv.view().aligned()},
         {1, static_cast<unsigned>(ceiling(slots, kernel::slots))}, order());
  const double row = 2.0 * dim;
  for (const std::size_t plane : {std::size_t{2}, std::size_t{3}}) {
    CHECK(static_cast<double>(counted.of(plane).loaded.bytes) / (slots * row) <= 1);
    CHECK(sectors(counted.of(plane).loaded) <= 1);
  }
  CHECK(s.rows_of(counted.of(0).stored.bytes) / slots <= 1);
  CHECK(sectors(counted.of(0).stored) <= 1);
  CHECK(counted.bank_conflicts == 0);
  // Both parts of the factor once for 128 slots; two products a number of whole tiles.
  const index_t blocks = ceiling(slots, kernel::slots);
  CHECK(static_cast<double>(counted.others().loaded.bytes) / (blocks * 4.0 * dim * dim) <= 1);
  const index_t columns = ceiling(dim, kernel::some) * kernel::some;
  CHECK(counted.mmas <= blocks * 2 * 8 * (columns / 8) * (dim / 16));
}

}  // namespace hot_clusters_emulator_test
}  // namespace kvmeld::cuda
