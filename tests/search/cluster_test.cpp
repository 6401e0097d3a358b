// SPDX-License-Identifier: MIT
// Clusters against loops: seeds, lazily or not, are the same rows; the nearest centre is the
// nearest, however many are looked at together.
#include "kvmeld/search/cluster.hpp"

#include <catch2/catch.hpp>
#include <random>

#include "oracle/oracle.hpp"

namespace cluster_test {

using kvmeld::index_t;
using matrix = kvmeld::dense::matrix;
using vector = kvmeld::dense::vector;

/// Whole numbers, so that products and distances are exact, and many of them equal.
struct points {
  matrix x;
  vector weight;
  std::vector<char> pinned;

  points(index_t n, index_t features, int span, index_t pins, bool even)
      : x(n, features), weight(n), pinned(static_cast<std::size_t>(n), 0) {
    std::mt19937 random(static_cast<unsigned>(span + features + pins));
    const auto number = [&](int to) { return static_cast<float>(random() % (unsigned(to) + 1)); };
    for (index_t s = 0; s < n; ++s) {
      for (index_t i = 0; i < features; ++i) {
        x(s, i) = number(span);
      }
      weight[s] = even ? 1.0F : std::exp2(-number(8));
      pinned[static_cast<std::size_t>(s)] = s < pins ? 1 : 0;
    }
  }

  /// The oracle's seeds and clusters.
  std::vector<int> by_loops(int count, int rounds, std::vector<std::size_t>& seeds) const {
    oracle::mat rows;
    oracle::vec w;
    std::vector<bool> pin;
    for (index_t s = 0; s < x.rows(); ++s) {
      rows.emplace_back(x.row(s).begin(), x.row(s).end());
      w.push_back(weight[s]);
      pin.push_back(pinned[static_cast<std::size_t>(s)] != 0);
    }
    seeds = oracle::fold_clusters::seeds(rows, w, pin, count);
    return oracle::fold_clusters::assigned(rows, w, pin, seeds, rounds);
  }
};

TEST_CASE("seeds are farthest-first in pools, rows go to the nearest, ties to the lower row",
          "[cluster]") {
  const int span = GENERATE(1, 4, 30);
  const index_t features = GENERATE(1, 19), pins = GENERATE(0, 1, 40);
  const index_t count = GENERATE(1, 3, 150, 270);  // a pool of all rows, or of half of them
  const bool even = GENERATE(true, false);
  CAPTURE(span, features, pins, count, even);
  const points p(count == 3 ? 90 : 520, features, span, pins, even);
  std::vector<std::size_t> seeds;
  const std::vector<int> expected = p.by_loops(count, 1, seeds);
  const auto c = kvmeld::search::cluster(p.x, p.pinned, p.weight, count, 1);
  CHECK(std::vector<std::size_t>(c.seeds.begin(), c.seeds.end()) == seeds);
  CHECK(c.cluster == expected);
}

TEST_CASE("centres move to the means of their rows, as halfs", "[cluster]") {
  const points p(300, 3, 30, GENERATE(0, 20), false);
  for (const int rounds : {2, 3, 6}) {
    CAPTURE(rounds);
    std::vector<std::size_t> seeds;
    const std::vector<int> expected = p.by_loops(100, rounds, seeds);
    CHECK(kvmeld::search::cluster(p.x, p.pinned, p.weight, 100, rounds).cluster == expected);
  }
}

TEST_CASE("every cluster has a seed of its own whatever rows are", "[cluster]") {
  points p(300, 2, 3, 4, true);  // of 16 places, some of them nowhere
  for (const index_t s : {2, 50, 51, 200}) {
    p.x(s, 0) = std::numeric_limits<float>::quiet_NaN();
  }
  p.weight[60] = std::numeric_limits<float>::quiet_NaN();
  const auto few = kvmeld::search::cluster(p.x, p.pinned, p.weight, 9, 3).seeds;
  for (const index_t nowhere : {50, 51, 60, 200}) {
    CHECK(std::find(few.begin(), few.end(), nowhere) == few.end());
  }
  const auto c = kvmeld::search::cluster(p.x, p.pinned, p.weight, 290, 3);
  for (index_t i = 0; i < 290; ++i) {
    const index_t seed = c.seeds[static_cast<std::size_t>(i)];
    CHECK((i == 0 || seed > c.seeds[static_cast<std::size_t>(i - 1)]));
    CHECK(c.cluster[static_cast<std::size_t>(seed)] == i);
  }
}

TEST_CASE("the nearest centre is that of all, ties to the lower one", "[cluster]") {
  // Whole numbers again; more centres than are looked at together, and duplicates among them.
  const index_t count = GENERATE(1, 2, 63, 64, 65, 200), features = GENERATE(1, 3, 19);
  CAPTURE(count, features);
  std::mt19937 random(static_cast<unsigned>(count + features));
  const auto fill = [&](matrix& m) {
    for (Eigen::Index i = 0; i < m.size(); ++i) {
      m.data()[i] = static_cast<float>(random() % 5);
    }
  };
  matrix x(300, features), centres(count, features);
  fill(x), fill(centres);
  std::vector<index_t> nearest(static_cast<std::size_t>(x.rows()), -1), right;
  kvmeld::search::nearest(x, centres, nearest);
  for (Eigen::Index r = 0; r < x.rows(); ++r) {
    index_t best = 0;
    for (index_t c = 1; c < count; ++c) {
      if ((x.row(r) - centres.row(c)).squaredNorm() <
          (x.row(r) - centres.row(best)).squaredNorm()) {
        best = c;
      }
    }
    right.push_back(best);
  }
  CHECK(nearest == right);
  x(7, 0) = std::numeric_limits<float>::quiet_NaN();  // is nowhere
  kvmeld::search::nearest(x, centres, nearest);
  right[7] = 0;
  CHECK(nearest == right);
}

}  // namespace cluster_test
