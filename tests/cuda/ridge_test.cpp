// SPDX-License-Identifier: MIT
// A ridge's tiles against elimination in double: heads of any numbers of unknowns, none among them.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "cuda/ridge_memory.hpp"
#include "oracle/linear.hpp"

namespace kvmeld::cuda {
namespace ridge_test {

struct ridge_case {
  std::vector<index_t> unknowns;  ///< of each head
  index_t dim, queries;
  float ridge = 0.002F, magnitude = 1;  ///< of what is lacking
  double mass = 1;                      ///< of probabilities
};

/// Probabilities of some slots, as they are after a softmax over more than these.
oracle::mat probabilities(index_t queries, index_t n, emulator::chance& random) {
  oracle::mat p;
  for (index_t q = 0; q < queries; ++q) {
    p.emplace_back();
    double sum = 0.1;
    for (index_t r = 0; r < n; ++r) {
      p.back().push_back(std::exp(random.below(1000) / 250.0 + 2.0 * (r % 3)));
      sum += p.back().back();
    }
    for (double& x : p.back()) {
      x /= sum;
    }
  }
  return p;
}

/// The solution of each head in double, of the probabilities that the device got.
oracle::mat solved(const oracle::mat& p, const oracle::mat& missing, double ridge) {
  oracle::mat gram = oracle::times(oracle::transposed(p), p);
  double trace = 0;
  for (std::size_t u = 0; u < gram.size(); ++u) {
    trace += gram[u][u];
  }
  for (std::size_t u = 0; u < gram.size(); ++u) {
    gram[u][u] += std::max(ridge * trace, static_cast<double>(p.size()) * std::ldexp(1, -40));
  }
  return gram.empty() ? gram : oracle::solve(gram, oracle::times(oracle::transposed(p), missing));
}

/// `relative`: of the solution's largest number.
void check_ridge(index_t halves, const ridge_case& c, double relative, std::uint64_t seed) {
  INFO("dim " << c.dim << ", queries " << c.queries << ", unknowns " << c.unknowns[0] << ", seed "
              << seed);
  emulator::chance random{seed};
  ridge_memory kept(c.unknowns, c.dim, c.queries, halves);
  std::vector<oracle::mat> exact;
  for (index_t h = 0; h < static_cast<index_t>(c.unknowns.size()); ++h) {
    const index_t n = c.unknowns[static_cast<std::size_t>(h)];
    oracle::mat p = probabilities(c.queries, n, random), missing;
    for (index_t q = 0; q < c.queries; ++q) {
      missing.emplace_back();
      for (index_t i = 0; i < c.dim; ++i) {
        const float x = c.magnitude * (static_cast<float>(random.below(2001)) / 1000 - 1);
        kept.put_missing(h, q, i, x);
        missing.back().push_back(x);
      }
    }
    for (index_t u = 0; u < (n + 127) / 128 * 128; ++u) {  // zeros up to whole tiles
      for (index_t q = 0; q < kept.system.depth; ++q) {
        const bool is = u < n && q < c.queries;
        const auto i = static_cast<std::size_t>(q), j = static_cast<std::size_t>(u);
        const double x = kept.put(h, u, q, is ? c.mass * p[i][j] : 0.0);
        if (is) {
          p[i][j] = x;
        }
      }
    }
    exact.push_back(solved(p, missing, double{c.ridge}));
  }
  kept.solve(c.ridge, order(seed));
  if (exact.size() > 1) {
    const auto first = kept.out.bytes();
    kept.solve(c.ridge, order(seed + 1));
    CHECK(kept.out.bytes() == first);
  }
  CHECK(kept.intact());
  for (std::size_t h = 0; h < exact.size(); ++h) {
    INFO("head " << h << " of " << exact[h].size());
    double worst = 0, size = 0;
    index_t others = 0;
    for (index_t s = 0; s < kept.capacity; ++s) {
      const auto u = static_cast<std::size_t>(s / 2);
      for (index_t i = 0; i < c.dim; ++i) {
        const float got = kept.out[(static_cast<index_t>(h) * kept.capacity + s) * c.dim + i];
        if (s % 2 == 1 && u < exact[h].size()) {
          const double x = exact[h][u][static_cast<std::size_t>(i)];
          worst = std::max(worst, std::isfinite(got) ? std::abs(got - x) : 1e30);
          size = std::max(size, std::abs(x));
        } else {
          others += got == 7 ? 0 : 1;
        }
      }
    }
    CHECK(others == 0);
    CHECK(worst <= relative * size);
  }
}

TEST_CASE("a ridge is solved as in double, tile by tile") {
  check_ridge(2, {{130, 1, 0}, 8, 130}, 1e-5, 1);
  check_ridge(2, {{257}, 33, 257}, 1e-5, 2);
  check_ridge(2, {{5}, 160, 3}, 1e-5, 3);         // two tiles of columns
  check_ridge(1, {{140, 20}, 64, 130}, 5e-4, 4);  // outputs are rounded to 11 bits
}

TEST_CASE("a ridge of more unknowns than queries is solved by the dual") {
  check_ridge(2, {{140, 130, 0}, 33, 100}, 1e-5, 10);
  check_ridge(2, {{140, 3}, 8, 20}, 1e-3, 14);  // a head of few unknowns loses digits
  check_ridge(1, {{257}, 136, 130}, 1e-5, 11);  // outputs stay floats
  check_ridge(2, {{140}, 8, 20, 1e-4F, 1e-10F}, 1e-4, 12);
  check_ridge(2, {{140}, 8, 20, 0.002F, 0}, 0, 13);
}

TEST_CASE("a ridge of any size, of outputs of any size") {
  check_ridge(2, {{20}, 8, 70, 1.0F}, 1e-5, 5);
  check_ridge(2, {{20}, 8, 70, 1e-4F}, 1e-4, 6);  // errs with 1 / ridge
  check_ridge(2, {{20}, 8, 70, 0.002F, 1e-20F}, 1e-5, 7);
  check_ridge(2, {{20}, 8, 70, 0.002F, 1e20F}, 1e-5, 8);
  check_ridge(2, {{20}, 8, 70, 0.002F, 0}, 0, 9);  // nothing is missing
}

TEST_CASE("a grid has room for the products of as many unknowns as a cache has slots") {
  for (const index_t queries : {max_queries, index_t{128}}) {  // by the dual too
    workspace_allocator count;
    const auto of = detail::allocate_ridge(count, 1, max_capacity, 256, queries, 1, 0);
    const auto blocks = of.dual ? detail::multiply_rows<1, true>::blocks(of, 1)
                                : detail::multiply_rows<1, false>::blocks(of, 1);
    CHECK((blocks.y <= 65535 && blocks.z <= 65535));
  }
}

TEST_CASE("a ridge of next to no mass is no less than rounding is worth") {
  for (const double mass : {1e-6, 1e-8, 1e-14, 1e-25}) {  // halfs make the last two nothing
    check_ridge(2, {{20, 3}, 8, 70, 0.002F, 1, mass}, 1e-5, 15);
    check_ridge(1, {{20, 3}, 8, 70, 0.002F, 1, mass}, 5e-4, 16);
    check_ridge(2, {{140}, 33, 100, 0.002F, 1, mass}, 1e-5, 17);
    check_ridge(2, {{140}, 33, 100, 0.002F, 1e28F, mass}, 1e-5, 18);  // what λ divides is large
  }
}

}  // namespace ridge_test
}  // namespace kvmeld::cuda
