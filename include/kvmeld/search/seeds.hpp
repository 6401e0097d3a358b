// SPDX-License-Identifier: MIT
/// Seeds of clusters: farthest-first, in rounds of a pool each.
#pragma once

#include <algorithm>  // std::nth_element
#include <limits>     // std::numeric_limits
#include <span>
#include <vector>

#include "kvmeld/score/dense.hpp"
#include "kvmeld/search/nearest_rows.hpp"
#include "kvmeld/search/seed_rounds.hpp"

namespace kvmeld {
inline namespace v0 {
namespace search {

/// Seeds, and the nearest of each row.
struct seeding {
  std::vector<index_t> seeds;    ///< [count] rows, round by round, ascending in each
  std::vector<index_t> nearest;  ///< [rows] the row of the nearest seed; ties to the lower row
};

/// Farthest-first (Gonzalez 1985), weighted, in rounds: the next seed is the row with the largest
/// gain, `weight · D²` to the nearest of the pinned and the seeds so far, ties to the lower row. A
/// round chooses among the pool of rows that gain most when it begins, by distances within it,
/// gains rounded to half; then all rows meet the new seeds. With nothing pinned the first seed is
/// the heaviest row, a round of its own. Gains that are no numbers are 0.
class pool_seeds {
 public:
  /// Of the rows of `x [rows, features]`.
  pool_seeds(const dense::matrix& x, std::span<const char> pinned, const dense::vector& weight)
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
    const auto wanted = static_cast<std::size_t>(count);
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
      gain_[static_cast<std::size_t>(row)] = -1;
    }
    meet(rows, true);
    found_.seeds.insert(found_.seeds.end(), rows.begin(), rows.end());
  }

  /// All rows meet `rows`, ascending.
  void meet(const std::vector<index_t>& rows, bool are_seeds) {
    const auto see = [&](Eigen::Index r, const auto& products) {
      const auto i = static_cast<std::size_t>(r);
      const float product = products.maxCoeff();
      const float gain = weight_[r] * std::max(0.0F, square_[r] - 2 * product);
      gain_[i] = std::min(gain_[i], gain == gain ? gain : 0.0F);
      index_t& nearest = found_.nearest[i];
      if (are_seeds && (nearest < 0 || product >= product_[i])) {  // seldom, after the first round
        const index_t seed = rows[static_cast<std::size_t>(nearest_of(products))];
        nearest = nearest < 0 || product > product_[i] || seed < nearest ? seed : nearest;
        product_[i] = product;
      }
    };
    each_row_of_products(x_, dense::matrix(x_(rows, Eigen::all)), see);
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
        const float x = gain_[static_cast<std::size_t>(a)], y = gain_[static_cast<std::size_t>(b)];
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
    const dense::matrix x = x_(rows, Eigen::all);
    float largest = 0;
    for (const index_t row : rows) {
      largest = std::max(largest, gain_[static_cast<std::size_t>(row)]);
    }
    const float scale = seed_rounds::scale(largest);
    std::vector<bound> heap;
    heap.reserve(rows.size());
    for (const index_t row : rows) {
      heap.push_back({as_half(gain_[static_cast<std::size_t>(row)] * scale),
                      static_cast<index_t>(heap.size()), 0});
    }
    std::ranges::make_heap(heap, later);
    std::vector<index_t> chosen, places;
    while (static_cast<index_t>(chosen.size()) < count) {
      std::ranges::pop_heap(heap, later);
      bound& first = heap.back();
      const auto now = static_cast<index_t>(places.size());
      if (first.seeds_compared == now) {
        places.push_back(first.place);
        chosen.push_back(rows[static_cast<std::size_t>(first.place)]);
        heap.pop_back();
        continue;
      }
      const float weight = weight_[rows[static_cast<std::size_t>(first.place)]];
      for (; first.seeds_compared < now; ++first.seeds_compared) {
        const index_t seed = places[static_cast<std::size_t>(first.seeds_compared)];
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

  const dense::matrix& x_;
  const dense::vector& weight_;
  dense::vector square_;
  std::vector<float> gain_;     // of the pinned and the seeds met; −1: a seed
  std::vector<float> product_;  // with the nearest seed, less half of its square
  seeding found_;
  bool any_pinned_ = false;
};

}  // namespace search
}  // namespace v0
}  // namespace kvmeld
