// Farthest-first seeds against three loops: lazily or not, they are the same rows in the same
// order.
#include "kvfold/cluster.hpp"

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
  CHECK(kvfold::detail::farthest_first(x, pinned, weight, count) ==
        by_loops(x, pinned, weight, count));
}
