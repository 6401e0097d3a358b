// SPDX-License-Identifier: MIT
/// Weighted k-means with farthest-first seeds: which slots become one.
#pragma once

#include <concepts>  // std::same_as
#include <span>
#include <vector>

#include "kvmeld/score/dense.hpp"
#include "kvmeld/search/seeds.hpp"

namespace kvmeld::inline v0 {
namespace search {

/// Clusters of the rows of `x [slots, features]` that are not pinned, each named by its seed.
struct clusters {
  detail::slot_vector<index_t> seeds;    ///< [clusters], ascending
  detail::slot_vector<index_t> cluster;  ///< [slots] index into `seeds`; −1: pinned
};

/// Lloyd's k-means from `cluster [slots]` on: `rounds` of weighted means, which are rounded to
/// `Element`, as `centres [clusters, features]`, and of assignment to the nearest of them. A centre
/// without members stays where it is.
template <class Element, dense::stored Matrix>
void lloyd(const dense::stored auto& x, const dense::stored auto& weight, index_t rounds,
           Matrix& centres, std::vector<index_t>& cluster) {
  using vector = dense::vector_of<dense::scalar_of<Matrix>>;
  for (index_t round = 0; centres.rows() > 0 && round < rounds; ++round) {
    Matrix sum = Matrix::Zero(centres.rows(), x.cols());
    vector total = vector::Zero(centres.rows());
    for (Eigen::Index s = 0; s < x.rows(); ++s) {
      const index_t c = cluster[as_size(s)];
      sum.row(c) += weight[s] * x.row(s);
      total[c] += weight[s];
    }
    for (Eigen::Index c = 0; c < centres.rows(); ++c) {
      if (total[c] > 0) {
        centres.row(c) = sum.row(c) / total[c];
      }
    }
    if constexpr (!std::same_as<Element, float>) {
      centres = centres.template cast<Element>().template cast<float>().eval();
    }
    nearest(x, centres, cluster);
  }
}

/// `count` clusters of the rows that are not pinned: seeds, to which each row is assigned, then
/// `rounds − 1` more of Lloyd's. A seed stays in its own cluster, so that none is empty. Centres
/// are rounded to half, as `x` is to be.
template <dense::stored Matrix, dense::stored Vector>
clusters cluster(const Matrix& x, std::span<const char> pinned, const Vector& weight, index_t count,
                 index_t rounds) {
  seeding found = pool_seeds(x, pinned, weight).choose(count);
  std::ranges::sort(found.seeds);
  clusters out{.seeds = std::move(found.seeds), .cluster = std::move(found.nearest)};
  detail::slot_vector<index_t> of_seed(pinned.size());  // row ↦ index into the seeds
  for (index_t c = 0; c < count; ++c) {
    of_seed[out.seeds[c]] = c;
  }
  for (index_t& seed : out.cluster) {
    seed = seed < 0 ? 0 : of_seed[seed];
  }
  Vector free_weight = weight;  // the pinned move no centre
  for (std::size_t s = 0; s < pinned.size(); ++s) {
    free_weight[static_cast<Eigen::Index>(s)] *= pinned[s] != 0 ? 0.0F : 1.0F;
  }
  Matrix centres = x(out.seeds, Eigen::all);
  lloyd<Eigen::half>(x, free_weight, rounds - 1, centres, out.cluster);
  for (std::size_t s = 0; s < pinned.size(); ++s) {
    out.cluster[s] = pinned[s] != 0 ? -1 : out.cluster[s];
  }
  for (index_t c = 0; c < count; ++c) {
    out.cluster[out.seeds[c]] = c;
  }
  return out;
}

}  // namespace search
}  // namespace kvmeld::inline v0
