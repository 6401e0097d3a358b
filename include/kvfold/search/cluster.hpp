/// Weighted k-means with farthest-first seeds: which slots become one.
#pragma once

#include <algorithm>  // std::ranges::make_heap
#include <limits>     // std::numeric_limits
#include <span>
#include <vector>

#include "kvfold/detail/multiply_add.hpp"
#include "kvfold/score/dense.hpp"
#include "kvfold/search/protection.hpp"

namespace kvfold {
inline namespace v0 {
namespace search {

/// Clusters of the rows of `x [slots, features]` that are not pinned, each named by its seed.
struct clusters {
  std::vector<index_t> seeds;    ///< [clusters], ascending
  std::vector<index_t> cluster;  ///< [slots] index into `seeds`; −1: pinned
};

/// `see(row, products)` for every row of `x`: its products with all of `centres`, less half of each
/// one's square, so that the largest is that of the nearest centre. In blocks of rows.
template <class See>
void each_row_of_products(const dense::stored auto& x, const dense::stored auto& centres, See see) {
  const dense::vector half = 0.5F * centres.rowwise().squaredNorm();
  constexpr Eigen::Index block = 256;
  dense::matrix dot;
  for (Eigen::Index begin = 0; begin < x.rows(); begin += block) {
    const Eigen::Index rows = std::min(block, x.rows() - begin);
    dot.resize(rows, centres.rows());
    for (Eigen::Index r = 0; r < rows; ++r) {
      dot.row(r) = -half.transpose();
    }
    dense::add_product_transposed(1, x.middleRows(begin, rows), centres, dot);
    for (Eigen::Index r = 0; r < rows; ++r) {
      see(begin + r, dot.row(r));
    }
  }
}

/// Where the largest of `x [n]` is; ties to the lower place. With NaN among them any place may
/// come, or `n`. Compares many at a time at a
/// vector's width, and then searches the place among those alone.
inline std::ptrdiff_t first_largest(const float* x, std::ptrdiff_t n) {
  constexpr std::ptrdiff_t many = dense::array_size;
  if (n < many) {
    return std::max_element(x, x + n) - x;
  }
  const float* from = x;
  float most = -std::numeric_limits<float>::infinity();
  for (std::ptrdiff_t i = 0; i < n; i += many) {
    const float* const next = x + std::min(i, n - many);  // the last block overlaps the one before
    if (const float top = Eigen::Map<const dense::array>(next).maxCoeff(); top > most) {
      most = top, from = next;
    }
  }
  return std::find(from, x + n, most) - x;
}

/// The nearest of `centres` to each row; ties to the lower one.
void nearest(const dense::stored auto& x, const dense::stored auto& centres,
             std::vector<index_t>& out) {
  each_row_of_products(x, centres, [&](Eigen::Index row, const auto& products) {
    const auto best = first_largest(products.data(), products.size());
    out[static_cast<std::size_t>(row)] =
        best < products.size() ? static_cast<index_t>(best) : 0;  // NaN is nowhere
  });
}

/// `D²` of every row to the nearest pinned one; the largest number where none is.
dense::vector distance_to_pinned(const dense::stored auto& x, std::span<const char> pinned) {
  dense::vector distance = dense::vector::Constant(x.rows(), std::numeric_limits<float>::max());
  std::vector<Eigen::Index> rows;
  for (std::size_t s = 0; s < pinned.size(); ++s) {
    if (pinned[s] != 0) {
      rows.push_back(static_cast<Eigen::Index>(s));
    }
  }
  if (!rows.empty()) {
    each_row_of_products(
        x, dense::matrix(x(rows, Eigen::all)), [&](Eigen::Index row, const auto& products) {
          distance[row] = std::max(x.row(row).squaredNorm() - 2 * products.maxCoeff(), 0.0F);
        });
  }
  return distance;
}

/// Farthest-first (Gonzalez 1985), weighted: repeatedly the row with the largest `weight · D²` to
/// the nearest of the pinned and the seeds so far; ties to the lower row. Distances
/// only decrease, so a stored one is an upper bound; only the current maximum is recomputed.
std::vector<index_t> farthest_first(const dense::stored auto& x, std::span<const char> pinned,
                                    const dense::stored auto& weight, index_t count) {
  dense::vector distance = distance_to_pinned(x, pinned);
  struct bound {
    float gain;  // weight · D² to the pinned and the seeds that it was compared with
    index_t row, seeds_compared;
  };
  const auto later = [](const bound& a, const bound& b) {
    return a.gain < b.gain || (a.gain == b.gain && a.row > b.row);
  };
  std::vector<bound> heap;
  for (Eigen::Index s = 0; s < x.rows(); ++s) {
    if (pinned[static_cast<std::size_t>(s)] == 0) {
      heap.push_back({rank(weight[s] * distance[s]), static_cast<index_t>(s), 0});
    }
  }
  std::ranges::make_heap(heap, later);
  std::vector<index_t> seeds;
  dense::matrix chosen(count, x.cols());  // the seeds' rows, together
  while (static_cast<index_t>(seeds.size()) < count) {
    std::ranges::pop_heap(heap, later);
    bound& first = heap.back();
    const auto now = static_cast<index_t>(seeds.size());
    if (first.seeds_compared == now) {
      chosen.row(now) = x.row(first.row);
      seeds.push_back(first.row);
      heap.pop_back();
      continue;
    }
    float& nearest = distance[first.row];
    for (; first.seeds_compared < now; ++first.seeds_compared) {
      nearest =
          std::min(nearest, (x.row(first.row) - chosen.row(first.seeds_compared)).squaredNorm());
    }
    first.gain = rank(weight[first.row] * nearest);
    std::ranges::push_heap(heap, later);
  }
  return seeds;
}

/// Lloyd's k-means: `rounds` of assignment to the nearest of `centres [clusters, features]`, with
/// weighted means between them. A centre without members stays where it is. `cluster [slots]`.
void lloyd(const dense::stored auto& x, const dense::stored auto& weight, index_t rounds,
           dense::stored auto& centres, std::vector<index_t>& cluster) {
  for (index_t round = 0; centres.rows() > 0 && round < rounds; ++round) {
    nearest(x, centres, cluster);
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
  clusters out{.seeds = farthest_first(x, pinned, weight, count),
               .cluster = std::vector<index_t>(static_cast<std::size_t>(x.rows()), 0)};
  std::ranges::sort(out.seeds);
  dense::matrix centres(count, x.cols());
  for (index_t c = 0; c < count; ++c) {
    centres.row(c) = x.row(out.seeds[static_cast<std::size_t>(c)]);
  }
  dense::vector free_weight = weight;  // the pinned move no centre
  for (std::size_t s = 0; s < pinned.size(); ++s) {
    free_weight[static_cast<Eigen::Index>(s)] *= pinned[s] != 0 ? 0.0F : 1.0F;
  }
  lloyd(x, free_weight, rounds, centres, out.cluster);
  for (std::size_t s = 0; s < pinned.size(); ++s) {
    out.cluster[s] = pinned[s] != 0 ? -1 : out.cluster[s];
  }
  for (index_t c = 0; c < count; ++c) {
    out.cluster[static_cast<std::size_t>(out.seeds[static_cast<std::size_t>(c)])] = c;
  }
  return out;
}

}  // namespace search
}  // namespace v0
}  // namespace kvfold
