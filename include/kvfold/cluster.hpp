/// Weighted k-means with farthest-first seeds: which slots become one.
#pragma once

#include <limits>  // std::numeric_limits
#include <span>
#include <vector>

#include "kvfold/dense.hpp"

namespace kvfold {

/// Clusters of the rows of `x [slots, features]` that are not pinned, each named by its seed.
struct clusters {
  std::vector<index_t> seeds;    ///< [clusters], ascending
  std::vector<index_t> cluster;  ///< [slots] index into `seeds`; −1: pinned
};

namespace detail {

/// The nearest of `centres` to each row; ties to the lower one.
void nearest(const dense::stored auto& x, const dense::stored auto& centres,
             std::vector<index_t>& out) {
  const dense::vector half = 0.5F * centres.rowwise().squaredNorm();
  constexpr Eigen::Index block = 256;
  dense::matrix dot;
  for (Eigen::Index begin = 0; begin < x.rows(); begin += block) {
    const Eigen::Index rows = std::min(block, x.rows() - begin);
    dot.noalias() = x.middleRows(begin, rows) * centres.transpose();
    dot.rowwise() -= half.transpose();
    for (Eigen::Index r = 0; r < rows; ++r) {
      Eigen::Index best = 0;
      dot.row(r).maxCoeff(&best);
      out[static_cast<std::size_t>(begin + r)] = static_cast<index_t>(best);
    }
  }
}

/// Farthest-first (Gonzalez 1985), weighted: repeatedly the row with the largest `weight · D²` to
/// the nearest of the pinned and the seeds so far; ties to the lower row.
std::vector<index_t> farthest_first(const dense::stored auto& x, std::span<const char> pinned,
                                    const dense::stored auto& weight, index_t count) {
  const Eigen::Index n = x.rows();
  const dense::vector square = x.rowwise().squaredNorm();
  dense::vector distance = dense::vector::Constant(n, std::numeric_limits<float>::max());
  std::vector<char> taken(pinned.begin(), pinned.end());
  const auto near = [&](Eigen::Index s) {
    const dense::vector dot = x * x.row(s).transpose();
    distance = distance.array().min((square.array() + square[s] - 2 * dot.array()).max(0.0F));
  };
  for (Eigen::Index s = 0; s < n; ++s) {
    if (pinned[static_cast<std::size_t>(s)] != 0) {
      near(s);
    }
  }
  std::vector<index_t> seeds;
  while (static_cast<index_t>(seeds.size()) < count) {
    Eigen::Index best = -1;
    float most = -1;
    for (Eigen::Index s = 0; s < n; ++s) {
      const float d = weight[s] * distance[s];
      if (taken[static_cast<std::size_t>(s)] == 0 && (best < 0 || d > most)) {
        best = s, most = d;
      }
    }
    taken[static_cast<std::size_t>(best)] = 1;
    seeds.push_back(static_cast<index_t>(best));
    near(best);
  }
  return seeds;
}

}  // namespace detail

/// Lloyd's k-means: `rounds` of assignment to the nearest of `centres [clusters, features]`, with
/// weighted means between them. A centre that attracts nobody stays where it is. `cluster [slots]`.
void lloyd(const dense::stored auto& x, const dense::stored auto& weight, index_t rounds,
           dense::stored auto& centres, std::vector<index_t>& cluster) {
  for (index_t round = 0; centres.rows() > 0 && round < rounds; ++round) {
    detail::nearest(x, centres, cluster);
    if (round + 1 == rounds) {
      break;
    }
    dense::matrix sum = dense::matrix::Zero(centres.rows(), x.cols());
    dense::vector total = dense::vector::Zero(centres.rows());
    for (Eigen::Index s = 0; s < x.rows(); ++s) {
      const index_t c = cluster[static_cast<std::size_t>(s)];
      sum.row(c) += weight[s] * x.row(s);
      total[c] += weight[s];
    }
    for (Eigen::Index c = 0; c < centres.rows(); ++c) {
      if (total[c] > 0) {
        centres.row(c) = sum.row(c) / total[c];
      }
    }
  }
}

/// `count` clusters of the rows that are not pinned: farthest-first seeds, then `rounds` of
/// Lloyd's. A seed stays in its own cluster, so that none is empty.
clusters cluster(const dense::stored auto& x, std::span<const char> pinned,
                 const dense::stored auto& weight, index_t count, index_t rounds) {
  clusters out{.seeds = detail::farthest_first(x, pinned, weight, count),
               .cluster = std::vector<index_t>(static_cast<std::size_t>(x.rows()), 0)};
  std::ranges::sort(out.seeds);
  dense::matrix centres(count, x.cols());
  for (index_t c = 0; c < count; ++c) {
    centres.row(c) = x.row(out.seeds[static_cast<std::size_t>(c)]);
  }
  dense::vector pull = weight;  // the pinned move no centre
  for (std::size_t s = 0; s < pinned.size(); ++s) {
    pull[static_cast<Eigen::Index>(s)] *= pinned[s] != 0 ? 0.0F : 1.0F;
  }
  lloyd(x, pull, rounds, centres, out.cluster);
  for (std::size_t s = 0; s < pinned.size(); ++s) {
    out.cluster[s] = pinned[s] != 0 ? -1 : out.cluster[s];
  }
  for (index_t c = 0; c < count; ++c) {
    out.cluster[static_cast<std::size_t>(out.seeds[static_cast<std::size_t>(c)])] = c;
  }
  return out;
}

}  // namespace kvfold
