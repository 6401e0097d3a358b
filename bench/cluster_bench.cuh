// SPDX-License-Identifier: MIT
/// Benches of the clusters of `fold`'s prompt: seeds, and the nearest centre.
#pragma once

#include <cmath>
#include <random>
#include <vector>

#include "cache_on_device.cuh"
#include "kvmeld/cuda/search/clusters.cuh"
#include "measure.cuh"

namespace card {

/// Heads of `slots` points of 256 halfs, all alike: 300 clumps of very different sizes, masses as
/// log-normal as attention's. Every 15th slot is pinned, a quarter of all are to stay.
struct points_on_device {
  static constexpr index_t depth = 256;
  index_t heads, slots, target = slots / 4;
  std::size_t n = cache_on_device::n(heads) * cache_on_device::n(slots);
  std::vector<float> numbers;  // [slots, depth] of a head
  buffer<half> points{n * depth}, means{n * depth};
  buffer<float> square{n}, mean_square{n}, weight{n}, gain{n}, similarity{n};
  buffer<index_t> kept{n}, removed{n}, into{n}, nearest{n}, seeds{n}, members{n}, spare{n},
      by_slot{n}, begin{n + cache_on_device::n(heads)};
  buffer<index_t> rows{cache_on_device::n(heads)}, length{rows.size()}, kept_count{rows.size()},
      removed_count{rows.size()};
  std::vector<index_t> pinned, others, marks;  // of all heads

  points_on_device(index_t h, index_t s) : heads(h), slots(s) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> middle(300 * depth);
    for (float& x : middle) {
      x = normal(random);
    }
    std::vector<half> halves;
    std::vector<float> squares, masses;
    for (index_t i = 0; i < slots; ++i) {
      const index_t clump = static_cast<index_t>(random() % 300 * (random() % 300) / 300);
      float sum = 0;
      for (index_t k = 0; k < depth; ++k) {
        const float wide = 0.1F + 0.1F * static_cast<float>(clump % 7);
        const float x = middle[cache_on_device::n(clump * depth + k)] + wide * normal(random);
        halves.push_back(__float2half_rn(x / 8));
        numbers.push_back(__half2float(halves.back()));
        sum += numbers.back() * numbers.back();
      }
      squares.push_back(sum), masses.push_back(std::exp(1.5F * normal(random)));
    }
    for (index_t of = 0; of < heads; ++of) {
      copy(points, halves, of), copy(square, squares, of), copy(weight, masses, of);
      for (index_t i = 0; i < slots; ++i) {
        (i % 15 == 0 ? pinned : others).push_back(i), marks.push_back(i % 15 == 0 ? i : -1);
      }
      pinned.resize(cache_on_device::n((of + 1) * slots)), others.resize(pinned.size());
    }
    removed = others, length = std::vector<index_t>(rows.size(), slots);
    removed_count = std::vector<index_t>(rows.size(), slots - pins());
    restore();
  }

  index_t pins() const { return (slots + 14) / 15; }
  index_t clusters() const { return target - pins(); }
  /// As before the seeds.
  void restore() {
    kept = pinned, into = marks;
    kept_count = std::vector<index_t>(rows.size(), pins());
  }
  /// As after them.
  void seeded() { kept_count = std::vector<index_t>(rows.size(), clusters()); }

  cuda::detail::clustered_points x() const {
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
  cuda::detail::cluster_scratch work() const {
    return {{means.data(), mean_square.data(), slots, depth},
            members.data(),
            spare.data(),
            by_slot.data(),
            begin.data()};
  }
  cuda::detail::seed_lists of_seeds() const {
    return {seeds.data(), gain.data(), cuda::head_budgets({.slots = target})};
  }

 private:
  template <class T>
  void copy(const buffer<T>& to, const std::vector<T>& from, index_t head) const {
    check(cudaMemcpy(to.data() + cache_on_device::n(head) * from.size(), from.data(),
                     from.size() * sizeof(T), cudaMemcpyHostToDevice),
          "to device");
  }
};

/// What is pinned, all rounds of seeds, and their order.
inline void cluster_seeds(benchmark::State& state) {
  points_on_device p(static_cast<index_t>(state.range(0)), static_cast<index_t>(state.range(1)));
  const auto run = [&] {
    cuda::detail::cluster_points<256>(p.x(), p.length.data(), p.of_seeds(), p.work(), 1,
                                      static_cast<unsigned>(p.heads), nullptr);
  };
  run();
  const auto seeds = p.kept.host(cache_on_device::n(p.clusters()));
  bool rise = p.kept_count.host()[0] == p.clusters();
  for (std::size_t i = 1; i < seeds.size(); ++i) {
    rise = rise && seeds[i] > seeds[i - 1];
  }
  if (!rise) {
    return state.SkipWithError("not as many seeds were chosen");
  }
  measure(state, run, l2::dirty, [&] { p.restore(); });
}

/// An assignment of Lloyd's: the first slots are the centres.
inline void cluster_nearest(benchmark::State& state) {
  points_on_device p(static_cast<index_t>(state.range(0)), static_cast<index_t>(state.range(1)));
  p.seeded();
  check(cudaMemcpy(p.means.data(), p.points.data(), p.points.size() * sizeof(half),
                   cudaMemcpyDeviceToDevice),
        "on device");
  check(cudaMemcpy(p.mean_square.data(), p.square.data(), p.square.size() * sizeof(float),
                   cudaMemcpyDeviceToDevice),
        "on device");
  using kernel = cuda::detail::nearest_centre<256>;
  const auto tiles = static_cast<unsigned>((p.slots + kernel::rows - 1) / kernel::rows);
  const auto run = [&] {
    cuda::launch(kernel{p.x(), {p.work().means, p.of_seeds(), cuda::detail::met_centres::means}},
                 {static_cast<unsigned>(p.heads), tiles}, nullptr);
  };
  run();
  const auto nearest = p.nearest.host(cache_on_device::n(p.slots - p.pins()));
  const auto distance = [&](index_t a, index_t b) {
    double sum = 0;
    for (index_t k = 0; k < p.depth; ++k) {
      const double d = static_cast<double>(p.numbers[cache_on_device::n(a * p.depth + k)]) -
                       static_cast<double>(p.numbers[cache_on_device::n(b * p.depth + k)]);
      sum += d * d;
    }
    return sum;
  };
  const auto last = static_cast<index_t>(nearest.size()) - 1;
  const index_t slot = p.others[cache_on_device::n(last)];
  double least = INFINITY;
  for (index_t c = 0; c < p.clusters(); ++c) {
    least = std::min(least, distance(slot, c));
  }
  if (!(distance(slot, nearest[cache_on_device::n(last)]) <= least * (1 + 1e-4))) {
    return state.SkipWithError("not the nearest was found");
  }
  report_operations(state, 2.0 * p.heads * (p.slots - p.pins()) * p.clusters() * p.depth,
                    measure(state, run));
}

}  // namespace card
