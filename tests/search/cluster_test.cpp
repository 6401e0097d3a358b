// Clusters against loops: seeds, lazily or not, are the same rows in the same order; the nearest
// centre is the nearest, however many are looked at together.
#include "kvfold/search/cluster.hpp"

#include <catch2/catch.hpp>
#include <random>

namespace {

using kvfold::index_t;
using matrix = kvfold::dense::matrix;
using vector = kvfold::dense::vector;

/// Repeatedly the row of the largest weight · D², the lower one on ties. [count]
std::vector<index_t> by_loops(const matrix& x, const std::vector<char>& pinned,
                              const vector& weight, index_t count) {
  const auto n = static_cast<index_t>(x.rows());
  std::vector<char> taken = pinned;
  std::vector<index_t> seeds;
  while (static_cast<index_t>(seeds.size()) < count) {
    index_t best = -1;
    float most = -1;
    for (index_t s = 0; s < n; ++s) {
      float distance = std::numeric_limits<float>::max();
      for (index_t t = 0; t < n; ++t) {
        if (taken[static_cast<std::size_t>(t)] != 0) {
          distance = std::min(distance, (x.row(s) - x.row(t)).squaredNorm());
        }
      }
      if (taken[static_cast<std::size_t>(s)] == 0 && weight[s] * distance > most) {
        best = s, most = weight[s] * distance;
      }
    }
    taken[static_cast<std::size_t>(best)] = 1;
    seeds.push_back(best);
  }
  return seeds;
}

}  // namespace

TEST_CASE("seeds are farthest-first, ties to the lower row", "[cluster]") {
  // Whole numbers, so that products and distances are exact, and many of them equal.
  const int span = GENERATE(1, 4, 30);
  const index_t features = GENERATE(1, 2, 19), pins = GENERATE(0, 1, 300);
  const bool even = GENERATE(true, false);
  CAPTURE(span, features, pins, even);
  std::mt19937 random(static_cast<unsigned>(span + features + pins));
  const auto number = [&](int to) { return static_cast<float>(random() % (unsigned(to) + 1)); };
  const index_t n = 340, count = 40;
  matrix x(n, features);
  vector weight(n);
  std::vector<char> pinned(static_cast<std::size_t>(n), 0);
  for (index_t s = 0; s < n; ++s) {
    for (index_t i = 0; i < features; ++i) {
      x(s, i) = number(span);
    }
    weight[s] = even ? 1.0F : std::exp2(-number(8));
    pinned[static_cast<std::size_t>(s)] = s < pins ? 1 : 0;
  }
  CHECK(kvfold::search::farthest_first(x, pinned, weight, count) ==
        by_loops(x, pinned, weight, count));
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
  kvfold::search::nearest(x, centres, nearest);
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
  kvfold::search::nearest(x, centres, nearest);
  right[7] = 0;
  CHECK(nearest == right);
}
