// SPDX-License-Identifier: MIT
/// Running mean and second moment of un-rotated queries, of each query head.
#pragma once

#include <algorithm>  // std::transform
#include <span>

#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/score/dense.hpp"

namespace kvmeld::inline v0 {
namespace score {

/// A view of the flat floats in `head_state::memory`; read only when they are const. Means rather
/// than sums, so that they stay exact enough in float however many queries come.
template <class Float>
class query_moments {
  template <class M>
  using map = Eigen::Map<std::conditional_t<std::is_const_v<Float>, const M, M>>;

 public:
  query_moments(std::span<Float> floats, index_t dim) : floats_(floats), dim_(dim) {}

  static std::size_t size(index_t dim, index_t group) {
    const auto d = as_size(dim);
    return 1 + as_size(group) * (d + d * d);
  }

  /// Adds one query's group; `query(g)` is head `g`'s `[dim]`, rotated to `position`. `scratch
  /// [dim]`.
  template <class Query>
  void count(index_t group, index_t position, const rotary& rope, Query query, float* scratch) {
    const float n = counted(1);
    rotation turn(rope, dim_);
    turn.by(-position);
    for (index_t g = 0; g < group; ++g) {
      const auto* q = query(g);
      std::transform(q, q + dim_, scratch, [](auto e) { return static_cast<float>(e); });
      turn(scratch);
      const Eigen::Map<const dense::vector> x(scratch, dim_);
      mean(g) += (x - mean(g)) / n;
      auto m = second(g);
      for (index_t i = 0; i < dim_; ++i) {
        m.row(i) += (x[i] * x.transpose() - m.row(i)) / n;
      }
    }
  }

  /// Adds many queries at once: `queries [count · group, dim]`, un-rotated, those of a group's
  /// head one after another.
  void count(index_t group, const dense::stored auto& queries) {
    const Eigen::Index rows = queries.rows() / group;
    if (rows == 0) {
      return;
    }
    const float n = counted(rows), lost = static_cast<float>(rows) / n;
    for (index_t g = 0; g < group; ++g) {
      const auto x = queries.middleRows(g * rows, rows);
      mean(g) += x.colwise().sum().transpose() / n - lost * mean(g);
      second(g) *= 1 - lost;
      dense::add_transposed_product(1 / n, x, x, second(g));
    }
  }

  map<dense::vector> mean(index_t g) const { return {at(g), dim_}; }                 ///< E[x]
  map<dense::matrix> second(index_t g) const { return {at(g) + dim_, dim_, dim_}; }  ///< E[x xᵀ]

 private:
  /// The count with so many more; exact in float up to there.
  float counted(Eigen::Index more) {
    return floats_[0] =
               std::min(floats_[0] + static_cast<float>(more), static_cast<float>(1 << 24));
  }
  Float* at(index_t g) const {
    return floats_.data() + 1 + std::ptrdiff_t{g} * (dim_ + dim_ * dim_);
  }

  std::span<Float> floats_;
  index_t dim_;
};

}  // namespace score
}  // namespace kvmeld::inline v0
