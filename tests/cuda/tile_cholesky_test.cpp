// SPDX-License-Identifier: MIT
// The Cholesky factor of a tile, and its inverse, against double loops.
#include "kvmeld/cuda/device/tile_cholesky.cuh"

#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "cuda/device_cache.hpp"

namespace kvmeld::cuda {
namespace tile_cholesky_test {

using tile = detail::tile_cholesky;
constexpr index_t side = tile::side;

struct factor_tile {
  static constexpr index_t threads = tile::threads;
  static constexpr bool of_heads = false;
  struct shared_memory {
    tile::array a;
    tile::diagonal_array diagonal;
  };
  float* a;  // [side, side]
  bool inverse;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    for (index_t e = thread_index(); e < side * side; e += threads) {
      shared.a[tile::at(e / side, e % side)] = a[e];
    }
    if (inverse) {
      tile::invert_factor(shared.a);
    } else {
      tile::factor(shared.a, shared.diagonal);
    }
    for (index_t e = thread_index(); e < side * side; e += threads) {
      a[e] = shared.a[tile::at(e / side, e % side)];
    }
  }
};

/// `I + Σ b bᵀ` of some random `b`; beyond `n` rows and columns the identity.
std::vector<double> eigenvalues_above_1(index_t n, index_t rank, std::uint64_t seed) {
  emulator::chance random{seed};
  std::vector<double> a(static_cast<std::size_t>(side * side), 0.0), b;
  for (index_t k = 0; k < rank; ++k) {
    b.assign(static_cast<std::size_t>(side), 0.0);
    for (index_t i = 0; i < n; ++i) {
      b[static_cast<std::size_t>(i)] = static_cast<double>(random.below(2001)) / 1000 - 1;
    }
    for (index_t e = 0; e < side * side; ++e) {
      a[static_cast<std::size_t>(e)] +=
          b[static_cast<std::size_t>(e / side)] * b[static_cast<std::size_t>(e % side)];
    }
  }
  for (index_t i = 0; i < side; ++i) {
    a[static_cast<std::size_t>(i * side + i)] += 1;
  }
  return a;
}

void check_factor(index_t n, index_t rank, std::uint64_t seed) {
  INFO("rows " << n << ", rank " << rank << ", seed " << seed);
  const auto a = eigenvalues_above_1(n, rank, seed);
  const auto at = [](index_t i, index_t j) { return static_cast<std::size_t>(i * side + j); };
  std::vector<double> l(a.size(), 0.0), v(a.size(), 0.0);  // the factor, and its inverse
  for (index_t j = 0; j < side; ++j) {
    for (index_t i = j; i < side; ++i) {
      double x = a[at(i, j)];
      for (index_t k = 0; k < j; ++k) {
        x -= l[at(i, k)] * l[at(j, k)];
      }
      l[at(i, j)] = i == j ? std::sqrt(x) : x / l[at(j, j)];
    }
  }
  for (index_t j = 0; j < side; ++j) {
    for (index_t i = j; i < side; ++i) {
      double x = i == j ? 1 : 0;
      for (index_t k = j; k < i; ++k) {
        x -= l[at(i, k)] * v[at(k, j)];
      }
      v[at(i, j)] = x / l[at(i, i)];
    }
  }
  for (const bool inverse : {false, true}) {
    device_buffer<float> x(std::vector<float>(a.begin(), a.end()));
    launch(factor_tile{x.data(), inverse}, {}, order(seed));
    const auto& wanted = inverse ? v : l;
    double worst = 0, largest = 0;
    for (index_t i = 0; i < side; ++i) {
      for (index_t j = 0; j <= i; ++j) {
        worst = worse(worst, std::abs(double{x[i * side + j]} - wanted[at(i, j)]));
        largest = std::max(largest, std::abs(wanted[at(i, j)]));
      }
    }
    INFO((inverse ? "the inverse" : "the factor"));
    CHECK(worst <= 1e-5 * largest);
    CHECK(x.intact());
  }
}

TEST_CASE("a tile's Cholesky factor and its inverse are those of double loops") {
  check_factor(128, 200, 1);
  check_factor(128, 3, 2);
  check_factor(40, 60, 3);
  check_factor(1, 5, 4);
  check_factor(128, 0, 5);
}

TEST_CASE("a pivot that is nothing but rounding loses its column, in its block and below") {
  for (const bool inverse : {false, true}) {
    std::vector<float> a(static_cast<std::size_t>(side * side), 0.0F);
    for (index_t i = 0; i < side; ++i) {
      a[static_cast<std::size_t>(i * side + i)] = 1;
    }
    const auto put = [&](index_t i, index_t j, float number) {
      a[static_cast<std::size_t>(i * side + j)] = a[static_cast<std::size_t>(j * side + i)] =
          number;
    };
    put(2, 2, -3), put(10, 2, 5), put(40, 2, 5), put(120, 2, 7);
    device_buffer<float> x(a);
    launch(factor_tile{x.data(), inverse}, {}, order(1));
    index_t others = 0;
    for (index_t i = 0; i < side; ++i) {
      for (index_t j = 0; j <= i; ++j) {
        others += x[i * side + j] == (i == j ? 1.0F : 0.0F) ? 0 : 1;
      }
    }
    CHECK(others == 0);
  }
}

}  // namespace tile_cholesky_test
}  // namespace kvmeld::cuda
