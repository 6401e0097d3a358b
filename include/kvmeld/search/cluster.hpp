// SPDX-License-Identifier: MIT
/// Weighted k-means from farthest-first seeds, in rounds of a pool each: which slots become one.
#pragma once

#include <algorithm>  // std::max_element
#include <concepts>   // std::same_as
#include <cstddef>    // std::ptrdiff_t
#include <limits>     // std::numeric_limits
#include <span>
#include <vector>

#include "kvmeld/detail/order.hpp"
#include "kvmeld/score/dense.hpp"
#include "kvmeld/search/rules.hpp"

namespace kvmeld::inline v0 {
namespace search {

/// Some rows of `x`. (Eigen's own lists of indices cost the compiler far more.)
template <dense::stored Matrix>
Matrix rows_of(const Matrix& x, std::span<const index_t> rows) {
  Matrix some(static_cast<Eigen::Index>(rows.size()), x.cols());
  for (Eigen::Index r = 0; r < some.rows(); ++r) {
    some.row(r) = x.row(rows[as_size(r)]);
  }
  return some;
}

/// `see(row, products)` for every row of `x`: its products with all of `centres`, less half of each
/// one's square, so that the largest is that of the nearest centre. In blocks of rows.
template <dense::stored X, class See>
void each_row_of_products(const X& x, const dense::stored auto& centres, See see) {
  const dense::vector_of<dense::scalar_of<X>> half = 0.5F * centres.rowwise().squaredNorm();
  constexpr Eigen::Index block = 256;
  dense::matrix_of<dense::scalar_of<X>> dot;
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

/// Where the largest of `x [n]` is; ties to the lower place. With NaN among them any place,
/// or `n`. Compares many at a time at a vector's width, and then searches the place among
/// those alone.
template <class Real>
std::ptrdiff_t first_largest(const Real* x, std::ptrdiff_t n) {
  using array = Eigen::Array<Real, 64, 1>;
  constexpr std::ptrdiff_t at_once = array::SizeAtCompileTime;
  if (n < at_once) {
    return std::max_element(x, x + n) - x;
  }
  const Real* from = x;
  Real largest = -std::numeric_limits<Real>::infinity();
  for (std::ptrdiff_t i = 0; i < n; i += at_once) {
    const Real* const next =
        x + std::min(i, n - at_once);  // the last block overlaps the one before
    if (const Real top = Eigen::Map<const array>(next).maxCoeff(); top > largest) {
      largest = top, from = next;
    }
  }
  return std::find(from, x + n, largest) - x;
}

/// Where the nearest of `products [centres]` is, ties to the lower one; 0 where none is a number.
inline Eigen::Index nearest_of(const auto& products) {
  const auto best = first_largest(products.data(), products.size());
  return best < products.size() ? best : 0;
}

/// The nearest of `centres` to each row; ties to the lower one.
void nearest(const dense::stored auto& x, const dense::stored auto& centres,
             std::vector<index_t>& out) {
  each_row_of_products(x, centres, [&](Eigen::Index row, const auto& products) {
    out[as_size(row)] = static_cast<index_t>(nearest_of(products));
  });
}

/// Seeds, and the nearest of each row.
struct seeding {
  detail::slot_vector<index_t> seeds;  ///< [count] rows, round by round, ascending in each
  detail::slot_vector<index_t>
      nearest;  ///< [rows] the row of the nearest seed; ties to the lower row
};

/// Farthest-first (Gonzalez 1985), weighted, in rounds: the next seed is the row with the largest
/// gain, `weight · D²` to the nearest of the pinned and the seeds so far, ties to the lower row. A
/// round chooses among the pool of rows that gain most when it begins, by distances within it,
/// gains rounded to half; then all rows meet the new seeds. With nothing pinned the first seed is
/// the heaviest row, a round of its own. Gains that are no numbers are 0.
template <dense::stored Matrix, dense::stored Vector>
class pool_seeds {
 public:
  /// Of the rows of `x [rows, features]`.
  pool_seeds(const Matrix& x, std::span<const char> pinned, const Vector& weight)
      : x_(x), weight_(weight), square_(x.rowwise().squaredNorm()) {
    std::vector<index_t> rows;
    for (const char is : pinned) {
      if (is != 0) {
        rows.push_back(static_cast<index_t>(gain_.size()));
      }
      gain_.push_back(is != 0 ? -1.0F : std::numeric_limits<float>::infinity());
    }
    product_.assign(pinned.size(), 0);
    found_.nearest.assign(pinned.size(), -1);
    any_pinned_ = !rows.empty();
    if (any_pinned_) {
      meet(rows, false);
    }
  }

  /// `count` of the rows that are not pinned, at most all.
  seeding choose(index_t count) && {
    if (!any_pinned_ && count > 0) {
      const auto heaviest = first_largest(weight_.data(), weight_.size());
      take({heaviest < weight_.size() ? static_cast<index_t>(heaviest) : 0});
    }
    const auto wanted = as_size(count);
    while (found_.seeds.size() < wanted) {
      const auto left = static_cast<index_t>(wanted - found_.seeds.size());
      take(farthest_of_pool(std::min(left, seed_rounds::quota(count))));
    }
    return std::move(found_);
  }

 private:
  struct bound {
    float gain;  // to the seeds that it was compared with, as half
    index_t place, seeds_compared;
  };
  static bool later(const bound& a, const bound& b) {
    return a.gain < b.gain || (a.gain == b.gain && a.place > b.place);
  }

  void take(std::vector<index_t> rows) {
    std::ranges::sort(rows);
    for (const index_t row : rows) {
      gain_[row] = -1;
    }
    meet(rows, true);
    found_.seeds.insert(found_.seeds.end(), rows.begin(), rows.end());
  }

  /// All rows meet `rows`, ascending.
  void meet(const std::vector<index_t>& rows, bool are_seeds) {
    const auto see = [&](Eigen::Index r, const auto& products) {
      const float product = products.maxCoeff();
      const float gain = weight_[r] * std::max(0.0F, square_[r] - 2 * product);
      gain_[r] = std::min(gain_[r], gain == gain ? gain : 0.0F);
      index_t& nearest = found_.nearest[r];
      if (are_seeds && (nearest < 0 || product >= product_[r])) {  // seldom, after the first round
        const index_t seed = rows[as_size(nearest_of(products))];
        nearest = nearest < 0 || product > product_[r] || seed < nearest ? seed : nearest;
        product_[r] = product;
      }
    };
    each_row_of_products(x_, rows_of(x_, rows), see);
  }

  /// The rows that gain most, ties to the lower one; ascending.
  std::vector<index_t> pool() const {
    std::vector<index_t> rows;
    for (std::size_t i = 0; i < gain_.size(); ++i) {
      if (gain_[i] >= 0) {
        rows.push_back(static_cast<index_t>(i));
      }
    }
    if (rows.size() > seed_rounds::pool) {
      const auto more = [this](index_t a, index_t b) {
        const float x = gain_[a], y = gain_[b];
        return x > y || (x == y && a < b);
      };
      std::ranges::nth_element(rows, rows.begin() + seed_rounds::pool, more);
      rows.resize(seed_rounds::pool);
      std::ranges::sort(rows);
    }
    return rows;
  }

  /// Distances only decrease, so a stored gain is an upper bound: only the current largest is
  /// compared with the seeds since.
  std::vector<index_t> farthest_of_pool(index_t count) const {
    const std::vector<index_t> rows = pool();
    const Matrix x = rows_of(x_, rows);
    float largest = 0;
    for (const index_t row : rows) {
      largest = std::max(largest, gain_[row]);
    }
    const float scale = seed_rounds::scale(largest);
    std::vector<bound> heap;
    heap.reserve(rows.size());
    for (const index_t row : rows) {
      heap.push_back({as_half(gain_[row] * scale), static_cast<index_t>(heap.size()), 0});
    }
    std::ranges::make_heap(heap, later);
    std::vector<index_t> chosen, places;
    while (static_cast<index_t>(chosen.size()) < count) {
      std::ranges::pop_heap(heap, later);
      bound& first = heap.back();
      const auto now = static_cast<index_t>(places.size());
      if (first.seeds_compared == now) {
        places.push_back(first.place);
        chosen.push_back(rows[as_size(first.place)]);
        heap.pop_back();
        continue;
      }
      const float weight = weight_[rows[as_size(first.place)]];
      for (; first.seeds_compared < now; ++first.seeds_compared) {
        const index_t seed = places[as_size(first.seeds_compared)];
        const float d = (x.row(first.place) - x.row(seed)).squaredNorm();
        first.gain = std::min(first.gain, as_half(d * weight * scale));
      }
      std::ranges::push_heap(heap, later);
    }
    return chosen;
  }

  static float as_half(float gain) {
    return static_cast<float>(static_cast<Eigen::half>(
        gain < seed_rounds::most_scaled ? gain : seed_rounds::most_scaled));
  }

  const Matrix& x_;
  const Vector& weight_;
  Vector square_;
  detail::slot_vector<float> gain_;     // of the pinned and the seeds met; −1: a seed
  detail::slot_vector<float> product_;  // with the nearest seed, less half of its square
  seeding found_;
  bool any_pinned_ = false;
};

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
  Matrix centres = rows_of(x, out.seeds);
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
