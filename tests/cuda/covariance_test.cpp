// SPDX-License-Identifier: MIT
// Mean and covariance of reference queries against double loops.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "cuda/device_cache.hpp"
#include "kvmeld/cuda/policies/fold/space.cuh"

namespace kvmeld::cuda {
namespace covariance_test {

struct query_case {
  cache_case shape;
  index_t count = 64;
  double mean = 0;     ///< of every number
  double outlier = 0;  ///< added to those of the query in the middle
};

template <class Scalar>
void check_covariance(const query_case& of, std::uint64_t seed) {
  const cache_case& c = of.shape;
  const index_t dim = c.dim, all = of.count * c.group;
  INFO("dim " << dim << ", group " << c.group << ", queries " << of.count << ", outlier "
              << of.outlier << ", seed " << seed);
  device_cache<Scalar> kv(c, std::vector<index_t>(static_cast<std::size_t>(c.heads), 1), seed);
  device_buffer<Scalar> q(static_cast<std::size_t>(c.heads * all * dim), 0);
  emulator::chance random{seed + 1};
  for (index_t i = 0; i < c.heads * all; ++i) {
    const double more = of.mean + (i % all == all / 2 ? of.outlier : 0);
    for (index_t e = 0; e < dim; ++e) {
      const double x = 3 * (static_cast<double>(random.below(20001)) / 10000 - 1) + more;
      q[i * dim + e] = from_float<Scalar>(static_cast<float>(x));
    }
  }
  device_buffer<index_t> planned(static_cast<std::size_t>(c.heads), 0);
  planned[c.heads - 1] = -1;
  const query_rows<Scalar> rows{q.data(), of.count, std::ptrdiff_t{all} * dim,
                                std::ptrdiff_t{of.count} * dim, dim};
  const detail::chosen_rows<Scalar> chosen{rows, rows.data, rows.count, planned.data()};
  detail::moment_scratch work{};
  workspace_allocator count;
  work.allocate(count, c.heads, dim, all);
  device_buffer<unsigned char> memory(count.used(), 0xff);
  workspace_allocator from({memory.data(), memory.size()});
  work.allocate(from, c.heads, dim, all);
  device_buffer<float> mean(static_cast<std::size_t>(c.heads * dim), 0),
      covariance(static_cast<std::size_t>(c.heads * dim * dim), 0);
  work.mean = mean.data(), work.covariance = covariance.data();
  detail::covariance_of<false>(kv.view(), detail::reference_rows<Scalar>{chosen, c.group, dim}, all,
                               planned.data(), 2, 0.5F, work, order(seed));
  CHECK((memory.intact() && mean.intact() && covariance.intact() && q.intact()));
  for (index_t h = 0; h < c.heads; ++h) {
    const auto at = [&](index_t i, index_t e) {
      return double{to_float(q[(h * all + i) * dim + e])};
    };
    std::vector<double> m(static_cast<std::size_t>(dim), 0.0);
    for (index_t i = 0; i < all; ++i) {
      for (index_t e = 0; e < dim; ++e) {
        m[static_cast<std::size_t>(e)] += at(i, e) / all;
      }
    }
    double worst = 0, largest = 0;
    for (index_t e = 0; e < dim; ++e) {
      for (index_t f = 0; f < dim; ++f) {
        double x = 0;
        for (index_t i = 0; i < all; ++i) {
          x += (at(i, e) - m[static_cast<std::size_t>(e)]) *
               (at(i, f) - m[static_cast<std::size_t>(f)]) / all;
        }
        largest = std::max(largest, std::abs(x));
        const double wanted = h == c.heads - 1 ? 0 : 2 * (x + (e == f ? 0.5 : 0));
        worst = worse(worst, std::abs(double{covariance[(h * dim + e) * dim + f]} - wanted));
      }
      const double wanted = h == c.heads - 1 ? 0 : m[static_cast<std::size_t>(e)];
      worst = worse(worst, std::abs(double{mean[h * dim + e]} - wanted));
    }
    CHECK(worst <= std::max(1e-6 * largest, 2e-5));
    CHECK(worst <= 5e-4);  // the 10⁻³ that is added keeps that of few queries positive
  }
}

TEST_CASE("the covariance of reference queries is that of double loops, in every scalar") {
  check_covariance<half>({.shape = {.heads = 2, .dim = 128}}, 1);
  check_covariance<bfloat16>({.shape = {.heads = 3, .dim = 40, .group = 3}, .count = 50}, 2);
  check_covariance<float>({.shape = {.heads = 2, .dim = 33, .group = 4}, .count = 5}, 3);
  check_covariance<half>({.shape = {.heads = 2, .dim = 160}, .count = 20}, 4);
  check_covariance<half>({.shape = {.heads = 2, .dim = 16, .group = 4}, .count = 300}, 5);
  check_covariance<half>({.shape = {.heads = 2, .dim = 7}, .count = 1}, 6);
}

TEST_CASE("a query far from all others, and a mean far from 0, cost the covariance no digits") {
  check_covariance<float>({.shape = {.heads = 2, .dim = 128}, .outlier = 30}, 11);
  check_covariance<float>({.shape = {.heads = 2, .dim = 128}, .mean = 100}, 12);
  check_covariance<half>({.shape = {.heads = 2, .dim = 64}, .count = 32, .outlier = 100}, 13);
}

}  // namespace covariance_test
}  // namespace kvmeld::cuda
