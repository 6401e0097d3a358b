// SPDX-License-Identifier: MIT
/// Non-negative least squares on the normal equations: what cannot be negative, such as mass.
#pragma once

#include <Eigen/Cholesky>
#include <Eigen/Core>
#include <Eigen/Jacobi>
#include <algorithm>    // std::min, std::max
#include <cmath>        // std::sqrt
#include <type_traits>  // std::type_identity_t
#include <vector>

#include "kvmeld/config.hpp"
#include "kvmeld/detail/product.hpp"

namespace kvmeld::inline v0 {
namespace merge {

/// The Cholesky factor of those rows and columns of `gram` that are in use.
template <dense::stored Gram>
class growing_factor {
 public:
  using vector = dense::vector_of<dense::scalar_of<Gram>>;  ///< of `Gram`'s numbers

  /// No column is in use yet. `gram [n, n]` has to live as long.
  explicit growing_factor(const Gram& gram) : gram_(gram), lower_(gram.rows(), gram.cols()) {}

  const std::vector<Eigen::Index>& columns() const { return columns_; }  ///< in use, as added

  /// Adds column `j`; false: it depends on those in use, up to rounding. O(columns²).
  bool add(Eigen::Index j) {
    const Eigen::Index n = size();
    if (n > 0) {
      auto row = lower_.row(n).head(n);
      row = gram_(columns_, j).transpose();
      lower_.topLeftCorner(n, n).template triangularView<Eigen::Lower>().solveInPlace(
          lower_.row(n).head(n).transpose());
    }
    const double rest = gram_(j, j) - lower_.row(n).head(n).squaredNorm();
    if (!(rest > 1e-14 * gram_(j, j))) {
      return false;
    }
    lower_(n, n) = std::sqrt(rest);
    columns_.push_back(j);
    return true;
  }

  /// Drops the `i`-th of the columns in use. The rows below it move up, an element too long:
  /// rotations take that away.
  void drop(Eigen::Index i) {
    columns_.erase(columns_.begin() + i);
    const Eigen::Index n = size();
    for (Eigen::Index r = i; r < n; ++r) {
      lower_.row(r).head(r + 2) = lower_.row(r + 1).head(r + 2);
    }
    for (Eigen::Index c = i; c < n; ++c) {
      Eigen::JacobiRotation<dense::scalar_of<Gram>> turn;
      turn.makeGivens(lower_(c, c), lower_(c, c + 1));
      lower_.middleRows(c, n - c).applyOnTheRight(c, c + 1, turn);
    }
  }

  /// `x [n]` with `gram x = wanted` in the columns in use and 0 in the others, with one step of
  /// refinement. `wanted [n]`.
  vector solve(const vector& wanted) const {
    vector x = solved(wanted);
    return x + solved(wanted - gram_ * x);
  }

 private:
  Eigen::Index size() const { return static_cast<Eigen::Index>(columns_.size()); }
  vector solved(const vector& wanted) const {
    const auto factor =
        lower_.topLeftCorner(size(), size()).template triangularView<Eigen::Lower>();
    vector part = wanted(columns_), x = vector::Zero(wanted.size());
    factor.solveInPlace(part);
    factor.transpose().solveInPlace(part);
    x(columns_) = part;
    return x;
  }

  const Gram& gram_;
  Eigen::Matrix<dense::scalar_of<Gram>, Eigen::Dynamic, Eigen::Dynamic> lower_;
  std::vector<Eigen::Index> columns_;
};

/// The `x [n] ≥ 0` of least `‖A x − b‖²`, by Lawson and Hanson's active sets (1974, chapter 23) on
/// `gram = AᵀA [n, n]`, `correlation = Aᵀb [n]`. `start [n] ≥ 0`: where to begin, 0 if empty; the
/// solution of almost the same problem saves almost all the work. A column that depends on others
/// stays at 0. O(n²) a round, and about as many rounds as columns that enter or leave the set.
template <dense::stored Gram, class Vector = dense::vector_of<dense::scalar_of<Gram>>>
Vector nnls(const Gram& gram, const std::type_identity_t<Vector>& correlation,
            const std::type_identity_t<Vector>& start = {}) {
  const Eigen::Index n = correlation.size();
  growing_factor factor(gram);
  Vector x = Vector::Zero(n);
  std::vector<char> passive(as_size(n), 0), refused(passive);
  for (Eigen::Index j = 0; j < start.size(); ++j) {
    if (start[j] > 0 && factor.add(j)) {
      x[j] = start[j], passive[as_size(j)] = 1;
    }
  }
  const double negligible = n == 0 ? 0 : 1e-13 * correlation.cwiseAbs().maxCoeff();
  Eigen::Index entering = -1;
  for (Eigen::Index round = 0; round < 10 * n + 10; ++round) {
    const auto& columns = factor.columns();
    const Vector s = factor.solve(correlation);  // the best of the columns in use
    if (entering >= 0 && s[entering] <= 0) {     // rounding: it gains nothing after all
      factor.drop(static_cast<Eigen::Index>(columns.size()) - 1);
      passive[as_size(entering)] = 0;
      refused[as_size(entering)] = 1;
    } else {
      if (entering >= 0) {
        std::fill(refused.begin(), refused.end(), 0);
      }
      entering = -1;
      double step = 1;  // as far towards s as nothing turns negative
      for (const Eigen::Index j : columns) {
        step = s[j] <= 0 ? std::min(step, x[j] / (x[j] - s[j])) : step;
      }
      bool inside = true;
      for (std::size_t i = columns.size(); i-- > 0;) {
        const Eigen::Index j = columns[i];
        const bool blocks = s[j] <= 0 && x[j] / (x[j] - s[j]) <= step;
        x[j] = blocks ? 0 : std::max(x[j] + step * (s[j] - x[j]), 0.0);
        if (blocks) {
          passive[as_size(j)] = 0, inside = false;
          factor.drop(static_cast<Eigen::Index>(i));
        }
      }
      if (!inside) {
        continue;
      }
    }
    // Karush, Kuhn and Tucker: at the minimum no column at 0 would gain by being more.
    const Vector gain = correlation - gram * x;
    do {
      entering = -1;
      for (Eigen::Index j = 0; j < n; ++j) {
        const auto i = as_size(j);
        if (passive[i] == 0 && refused[i] == 0 && gain[j] > negligible &&
            (entering < 0 || gain[j] > gain[entering])) {
          entering = j;
        }
      }
      if (entering < 0) {
        return x;
      }
      const bool added = factor.add(entering);
      (added ? passive : refused)[as_size(entering)] = 1;
    } while (passive[as_size(entering)] == 0);
  }
  return x;
}

}  // namespace merge
}  // namespace kvmeld::inline v0
