// SPDX-License-Identifier: MIT
/// Fitting slots to the full cache on reference queries: log-mass in the mean, values by ridge.
#pragma once

#include <Eigen/Cholesky>
#include <algorithm>  // std::max
#include <cmath>      // std::log
#include <limits>

#include "kvmeld/score/dense.hpp"
#include "kvmeld/score/softmax.hpp"

namespace kvmeld {
inline namespace v0 {
namespace merge {

/// `ln(mass / alone)`. Without attention there is no mass to fit: floors keep it finite.
inline float log_ratio(float mass, float alone) {
  constexpr float least = 1e-20F, most = 1e20F;
  return std::log(std::max(mass, least) / std::clamp(alone, least, most));
}

/// The log-mass that gives every slot, in the mean over the queries, the mass of what it stands
/// for: `β_r = ln( Σ_q Σ_{i∈r} p_qi / Σ_q exp(scale·q·k_r − Z_q) )`. `keys [slots, dim]`, `mass
/// [slots]` of the members, `queries [queries, dim]`, `log_sum_exp [queries]` of the full cache.
dense::vector fit_log_mass(const dense::stored auto& keys, const dense::stored auto& mass,
                           const dense::stored auto& queries, const dense::stored auto& log_sum_exp,
                           float scale) {
  dense::vector alone = dense::vector::Zero(keys.rows());
  constexpr Eigen::Index block = 64;
  dense::matrix e;
  for (Eigen::Index begin = 0; begin < queries.rows(); begin += block) {
    const Eigen::Index rows = std::min(block, queries.rows() - begin);
    e.resize(rows, keys.rows());
    dense::set_product_transposed(scale, queries.middleRows(begin, rows), keys, e);
    e.colwise() -= log_sum_exp.segment(begin, rows);
    alone += e.array().exp().matrix().colwise().sum().transpose();
  }
  return mass.binaryExpr(alone, &log_ratio);
}

/// Softmax attention `[queries, slots]` over slots with log-mass.
dense::matrix probabilities(const dense::stored auto& queries, const dense::stored auto& keys,
                            const dense::stored auto& log_mass, float scale) {
  dense::matrix p(queries.rows(), keys.rows());
  p.rowwise() = log_mass.transpose();
  dense::add_product_transposed(scale, queries, keys, p);
  for (Eigen::Index r = 0; r < p.rows(); ++r) {
    score::softmax<> all;
    all.take(p.row(r).array());
    p.row(r) /= all.sum;
  }
  return p;
}

/// `Δ [slots, dim]` such that `P (V + Δ)` comes close to what is wanted, at least squares: solves
/// `(PᵀP + λI) Δ = Pᵀ missing`. `missing [queries, dim]` is what `P V` lacks. `λ` is `ridge` times
/// the trace of `PᵀP`, but at least (8ε)² a query, ε of floats: where the slots have next to no
/// mass, outputs lack what rounding takes, a few ε of a value, and Δ would be fitted to that. By
/// `‖Δ‖ ≤ ‖missing‖ / (2 λ½)` it is a part of a value then. Without a ridge Δ is 0. The smaller of
/// the two equal forms is solved.
dense::matrix ridge_values(const dense::stored auto& p, const dense::stored auto& missing,
                           float ridge) {
  if (ridge == 0 || p.size() == 0) {
    return dense::matrix::Zero(p.cols(), missing.cols());
  }
  const bool primal = p.cols() <= p.rows();
  using matrix = dense::matrix_of<double>;
  const matrix rows = primal ? matrix(p.transpose().template cast<double>())
                             : matrix(p.template cast<double>());  // the smaller side's
  matrix y = missing.template cast<double>();
  Eigen::MatrixXd gram = Eigen::MatrixXd::Zero(rows.rows(), rows.rows());  // its lower triangle
  gram.selfadjointView<Eigen::Lower>().rankUpdate(rows);
  constexpr double lost = 8 * std::numeric_limits<float>::epsilon();
  const double lambda =
      std::max(double{ridge} * gram.trace(), static_cast<double>(p.rows()) * lost * lost);
  gram.diagonal().array() += lambda;
  const Eigen::LLT<Eigen::Ref<Eigen::MatrixXd>> factor(gram);
  matrix delta = matrix::Zero(p.cols(), y.cols());  // (PᵀP + λI)⁻¹ Pᵀ y = Pᵀ (PPᵀ + λI)⁻¹ y
  if (primal) {
    dense::add_product(1, rows, y, delta);
    factor.solveInPlace(delta);
  } else {
    factor.solveInPlace(y);
    dense::add_transposed_product(1, rows, y, delta);
  }
  return delta.template cast<float>();
}

}  // namespace merge
}  // namespace v0
}  // namespace kvmeld
