// SPDX-License-Identifier: MIT
// Leverage of un-rotated keys against double loops over its definition: the covariance of keys as
// they were before RoPE, and what is left of a key when that is divided out.
#include "kvmeld/cuda/policies/fold/leverage.cuh"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "cuda/device_cache.hpp"

namespace kvmeld::cuda {
namespace leverage_test {

using matrix = std::vector<std::vector<double>>;

struct leverage_case {
  cache_case shape;
  std::vector<index_t> lengths;
  double mean = 0;  ///< of every number of a key, before RoPE
  float ridge = 1;
  bool halves = true;   ///< pairs of RoPE
  bool single = false;  ///< only slots that hold one token
  index_t slots = 0;    ///< heads with no more slots are not asked
  double outlier = 0;   ///< added to every number of some keys, that in the middle among them
  double error = 2e-5;  ///< of a leverage, at most
};

/// `x` turned by `positions`, pair by pair, in double.
std::vector<double> turned(std::vector<double> x, const rope_params& turn, index_t positions) {
  const auto dim = static_cast<index_t>(x.size());
  for (index_t p = 0; p < dim / 2; ++p) {
    const double angle = turn.frequency[p] * positions;
    double& a = x[static_cast<std::size_t>(turn.halves ? p : 2 * p)];
    double& b = x[static_cast<std::size_t>(turn.halves ? p + dim / 2 : 2 * p + 1)];
    const double y = a * std::cos(angle) - b * std::sin(angle);
    b = b * std::cos(angle) + a * std::sin(angle), a = y;
  }
  return x;
}

/// `xᵀ a⁻¹ x` of a symmetric positive `a`, by elimination.
double inverse_product(matrix a, std::vector<double> x) {
  const std::size_t n = x.size();
  std::vector<double> y = x;
  for (std::size_t k = 0; k < n; ++k) {
    for (std::size_t i = k + 1; i < n; ++i) {
      const double f = a[i][k] / a[k][k];
      for (std::size_t j = k; j < n; ++j) {
        a[i][j] -= f * a[k][j];
      }
      y[i] -= f * y[k];
    }
  }
  double sum = 0;
  for (std::size_t k = n; k-- > 0;) {
    for (std::size_t j = k + 1; j < n; ++j) {
      y[k] -= a[k][j] * y[j];
    }
    y[k] /= a[k][k];
    sum += y[k] * x[k];
  }
  return sum;
}

template <class Scalar>
void check_leverage(const leverage_case& of, std::uint64_t seed) {
  const cache_case& c = of.shape;
  INFO("dim " << c.dim << ", slots " << c.capacity << ", scalar of " << sizeof(Scalar)
              << " bytes, seed " << seed);
  fold_rule rule;
  rule.leverage_ridge = of.ridge, rule.turn.halves = of.halves;
  for (index_t p = 0; p < c.dim / 2; ++p) {
    rule.turn.frequency[p] = std::pow(10'000.0, -2.0 * p / c.dim);
  }
  device_cache<Scalar> kv(c, of.lengths, seed, {slot_reduce::sum, slot_reduce::max});
  emulator::chance random{seed + 1};
  const auto any = [&] { return static_cast<double>(random.below(20001)) / 10000 - 1; };
  for (index_t h = 0; h < c.heads; ++h) {
    for (index_t s = 0; s < of.lengths[static_cast<std::size_t>(h)]; ++s) {
      kv.position[kv.at(h, s)] = 3 * s + static_cast<index_t>(random.below(3));
      kv.column(fold_rule::tokens, h, s) = s % 5 == 3 ? 2.0F : 1.0F;
      std::vector<double> x;
      for (index_t i = 0; i < c.dim; ++i) {  // some numbers wide, some that go with others
        x.push_back(of.mean + any() * (i % 7 == 0 ? 8 : 1) + (i > 0 ? 0.5 * x.back() : 0));
      }
      const index_t n = of.lengths[static_cast<std::size_t>(h)];
      for (double& number : x) {
        number += s == 0 || s == n / 2 || s == n / 3 ? of.outlier : 0;
      }
      x = turned(x, rule.turn, kv.position[kv.at(h, s)]);
      for (index_t i = 0; i < c.dim; ++i) {
        kv.key(h, s)[i] = from_float<Scalar>(static_cast<float>(x[static_cast<std::size_t>(i)]));
      }
    }
  }
  detail::leverage_scratch work{};
  const auto shape = detail::shape_of(kv.view());
  workspace_allocator count;
  work.allocate(count, shape);
  device_buffer<unsigned char> memory(count.used(), 0xff);  // NaN, whatever is read of it
  workspace_allocator from({memory.data(), memory.size()});
  work.allocate(from, shape);
  device_buffer<float> out(static_cast<std::size_t>(c.heads * c.capacity), 0);
  device_buffer<index_t> planned(static_cast<std::size_t>(c.heads), 0);
  work.leverage = out.data();
  const auto run = [&](std::uint64_t order_seed) {
    detail::leverage_of_keys(kv.view(), kv.state, rule, budget{.slots = of.slots}, of.single,
                             nullptr, planned.data(), work, order(order_seed));
    return out.bytes();
  };
  const auto bytes = run(seed);
  CHECK(run(seed + 1) == bytes);
  CHECK((memory.intact() && out.intact() && planned.intact()));
  kv.check_guards();

  for (index_t h = 0; h < c.heads; ++h) {
    const index_t n = of.lengths[static_cast<std::size_t>(h)];
    const auto d = static_cast<std::size_t>(c.dim);
    INFO("head " << h << " of " << n << " slots");
    CHECK(planned[h] == (n > of.slots ? 0 : -1));
    if (n <= of.slots) {
      continue;
    }
    matrix keys;
    std::vector<double> mean(d, 0.0);
    for (index_t s = 0; s < n; ++s) {
      std::vector<double> x;
      for (index_t i = 0; i < c.dim; ++i) {
        x.push_back(double{to_float(kv.key(h, s)[i])});
      }
      keys.push_back(turned(x, rule.turn, -kv.position[kv.at(h, s)]));
      for (std::size_t i = 0; i < d; ++i) {
        mean[i] += keys.back()[i] / n;
      }
    }
    matrix covariance(d, std::vector<double>(d, 0.0));
    double trace = 0;
    for (auto& x : keys) {
      for (std::size_t i = 0; i < d; ++i) {
        x[i] -= mean[i];
      }
      for (std::size_t i = 0; i < d; ++i) {
        for (std::size_t j = 0; j < d; ++j) {
          covariance[i][j] += x[i] * x[j] / n;
        }
        trace += x[i] * x[i] / n;
      }
    }
    for (std::size_t i = 0; i < d; ++i) {
      covariance[i][i] += std::max(double{of.ridge} * trace / c.dim, 1e-20);
    }
    double worst = 0;
    for (index_t s = 0; s < n; s += 1 + n / 24) {  // each costs dim³
      const bool is = !of.single || s % 5 != 3;
      const double wanted =
          is ? inverse_product(covariance, keys[static_cast<std::size_t>(s)]) : 0.0;
      const double got = double{out[kv.at(h, s)]};
      worst = worse(worst, std::abs(got - wanted) / std::max(wanted, 1e-3));
    }
    CHECK(worst <= of.error);
  }
}

void in_every_scalar(const leverage_case& of, std::uint64_t seed) {
  check_leverage<float>(of, seed);
  check_leverage<half>(of, seed);
  check_leverage<bfloat16>(of, seed);
}

TEST_CASE("leverage is that of double loops, in every scalar") {
  in_every_scalar({.shape = {.heads = 3, .capacity = 150, .dim = 128}, .lengths = {150, 64, 33}},
                  1);
  in_every_scalar({.shape = {.heads = 2, .capacity = 90, .dim = 33, .odd = 1},
                   .lengths = {90, 65},
                   .halves = false},
                  2);
}

TEST_CASE("leverage takes every dim, any length, pages, and slots that hold one token alone") {
  std::uint64_t seed = 10;
  for (const index_t dim : {1, 2, 16, 63, 64, 65, 100}) {
    in_turn(++seed, [&]<class Scalar>(Scalar) {
      check_leverage<Scalar>({.shape = {.heads = 3, .capacity = 70, .dim = dim, .paged = true},
                              .lengths = {1, 31, 70},
                              .single = dim % 2 == 0},
                             seed);
    });
  }
  for (const index_t dim : {160, 255, 256}) {
    in_turn(++seed, [&]<class Scalar>(Scalar) {
      check_leverage<Scalar>(
          {.shape = {.heads = 2, .capacity = 40, .dim = dim}, .lengths = {40, 17}, .single = true},
          seed);
    });
  }
}

TEST_CASE("leverage of heads that are split into parts, and of those that have none to free") {
  check_leverage<half>(
      {.shape = {.heads = 2, .capacity = 700, .dim = 64}, .lengths = {700, 130}, .slots = 130}, 31);
  check_leverage<bfloat16>({.shape = {.heads = 9, .capacity = 300, .dim = 24},
                            .lengths = {300, 0, 1, 256, 128, 129, 7, 250, 33}},
                           32);
}

TEST_CASE("a mean far from 0 and a small ridge cost leverage no digits") {
  for (const double mean : {10.0, 100.0}) {
    check_leverage<float>(
        {.shape = {.heads = 1, .capacity = 100, .dim = 48}, .lengths = {100}, .mean = mean}, 41);
  }
  check_leverage<float>(
      {.shape = {.heads = 1, .capacity = 100, .dim = 16}, .lengths = {100}, .ridge = 0.01F}, 42);
}

TEST_CASE("keys far from all others cost the others no digits") {
  for (const double outlier : {30.0, 1000.0}) {
    check_leverage<float>({.shape = {.heads = 1, .capacity = 1100, .dim = 16},
                           .lengths = {1100},
                           .outlier = outlier,
                           .error = outlier < 100 ? 2e-5 : 2e-4},
                          51);
    check_leverage<float>({.shape = {.heads = 1, .capacity = 60, .dim = 128},
                           .lengths = {60},
                           .outlier = outlier,
                           .error = outlier < 100 ? 2e-5 : 2e-4},
                          52);
  }
}

TEST_CASE("fewer keys than dims have a leverage under a small ridge too") {
  for (const float ridge : {1e-3F, 1e-5F, 1e-6F}) {
    check_leverage<float>({.shape = {.heads = 2, .capacity = 100, .dim = 128},
                           .lengths = {20, 100},
                           .ridge = ridge,
                           .error = std::max(2e-5, 1e-7 / double{ridge})},
                          61);
    check_leverage<float>({.shape = {.heads = 1, .capacity = 40, .dim = 130},
                           .lengths = {40},
                           .ridge = ridge,
                           .error = std::max(2e-5, 1e-7 / double{ridge})},
                          62);
  }
}

TEST_CASE("keys that are all alike have leverage 0") {
  cache_case c{.heads = 1, .capacity = 40, .dim = 32};
  device_cache<float> kv(c, {40}, 3, {slot_reduce::sum, slot_reduce::max});
  for (index_t s = 0; s < 40; ++s) {
    kv.position[s] = 0;
    for (index_t i = 0; i < c.dim; ++i) {
      kv.key(0, s)[i] = 0.1F * static_cast<float>(i);
    }
  }
  detail::leverage_scratch work{};
  workspace_allocator count;
  work.allocate(count, detail::shape_of(kv.view()));
  device_buffer<unsigned char> memory(count.used());
  workspace_allocator from({memory.data(), memory.size()});
  work.allocate(from, detail::shape_of(kv.view()));
  device_buffer<float> out(40);
  device_buffer<index_t> planned(1);
  work.leverage = out.data();
  detail::leverage_of_keys(kv.view(), kv.state, fold_rule{}, budget{.slots = 0}, false, nullptr,
                           planned.data(), work, order());
  for (index_t s = 0; s < 40; ++s) {
    CHECK(out[s] == 0);
  }
}

}  // namespace leverage_test
}  // namespace kvmeld::cuda
