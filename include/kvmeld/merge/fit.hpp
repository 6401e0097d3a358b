// SPDX-License-Identifier: MIT
/// Fitting slots to the full cache on reference queries: log-mass in the mean, values by ridge, and
/// gradient steps on all of them.
#pragma once

#include <algorithm>  // std::max
#include <cmath>      // std::log
#include <concepts>   // std::same_as
#include <limits>
#include <span>

#include "kvmeld/score/dense.hpp"
#include "kvmeld/score/softmax.hpp"

namespace kvmeld::inline v0 {
namespace merge {

/// `ln(mass / alone)`. Without attention there is no mass to fit: floors keep it finite.
inline float log_ratio(float mass, float alone) {
  constexpr float floor = 1e-20F, ceiling = 1e20F;
  return std::log(std::max(mass, floor) / std::clamp(alone, floor, ceiling));
}

/// The log-mass that gives every slot, in the mean over the queries, the mass of what it stands
/// for: `β_r = ln( Σ_q Σ_{i∈r} p_qi / Σ_q exp(ℓ_qr − Z_q) )`, `ℓ` without log-mass. `keys [slots,
/// dim]`, `mass [slots]` of the members, `queries [queries, dim]`, `log_sum_exp [queries]` of the
/// full cache.
template <dense::stored Keys>
dense::vector fit_log_mass(const Keys& keys, const dense::stored auto& mass,
                           const dense::stored auto& queries, const dense::stored auto& log_sum_exp,
                           const score::logit_terms& terms) {
  dense::vector_of<dense::scalar_of<Keys>> alone(keys.rows());
  alone.setZero();
  constexpr Eigen::Index block = 64;
  dense::matrix_of<dense::scalar_of<Keys>> e;
  for (Eigen::Index begin = 0; begin < queries.rows(); begin += block) {
    const Eigen::Index rows = std::min(block, queries.rows() - begin);
    e.resize(rows, keys.rows());
    dense::set_product_transposed(terms.scale(), queries.middleRows(begin, rows), keys, e);
    terms.cap_logits(e.array());
    e.colwise() -= log_sum_exp.segment(begin, rows);
    alone += e.array().exp().matrix().colwise().sum().transpose();
  }
  return mass.binaryExpr(alone, &log_ratio);
}

/// Makes logits `p [rows, slots]` of the queries from `first` on, of `queries`, probabilities.
/// Returns their log-sum-exp `[rows]`.
template <dense::stored P>
auto softmax_rows(const score::logit_terms& terms, Eigen::Index first, Eigen::Index queries, P& p) {
  dense::vector_of<dense::scalar_of<P>> log_sum_exp(p.rows());
  for (Eigen::Index r = 0; r < p.rows(); ++r) {
    score::softmax<> all = terms.sink_of_row(first + r, queries);
    all.take(p.row(r).array());
    p.row(r) /= all.sum;
    log_sum_exp[r] = all.log_sum_exp();
  }
  return log_sum_exp;
}

/// Softmax attention `[queries, slots]` over slots with log-mass.
template <dense::stored Queries>
auto probabilities(const Queries& queries, const dense::stored auto& keys,
                   const dense::stored auto& log_mass, const score::logit_terms& terms) {
  dense::matrix_of<dense::scalar_of<Queries>> p(queries.rows(), keys.rows());
  dense::set_logits(terms, queries, keys, log_mass, p);
  softmax_rows(terms, 0, queries.rows(), p);
  return p;
}

/// `Δ [slots, dim]` such that `P (V + Δ)` comes close to what is wanted, at least squares: solves
/// `(PᵀP + λI) Δ = Pᵀ missing`. `missing [queries, dim]` is what `P V` lacks. `λ` is `ridge` times
/// the trace of `PᵀP`, but at least (8ε)² a query, ε of floats: where the slots have next to no
/// mass, outputs lack what rounding takes, a few ε of a value, and Δ would be fitted to that. By
/// `‖Δ‖ ≤ ‖missing‖ / (2 λ½)` it is a part of a value then. Without a ridge Δ is 0. The smaller of
/// the two equal forms is solved.
template <dense::stored P>
dense::matrix ridge_values(const P& p, const dense::stored auto& missing, float ridge) {
  if (ridge == 0 || p.size() == 0) {
    return dense::matrix::Zero(p.cols(), missing.cols());
  }
  const bool primal = p.cols() <= p.rows();
  using real = decltype(dense::scalar_of<P>{} * 1.0);  // double
  using matrix = dense::matrix_of<real>;
  const matrix x = primal ? matrix(p.template cast<real>())
                          : matrix(p.transpose().template cast<real>());  // [.., smaller side]
  matrix y = missing.template cast<real>(), gram = matrix::Zero(x.cols(), x.cols());
  dense::add_gram(x, gram);
  constexpr double lost = 8 * std::numeric_limits<float>::epsilon();
  const double lambda =
      std::max(double{ridge} * gram.trace(), static_cast<double>(p.rows()) * lost * lost);
  gram.diagonal().array() += lambda;
  dense::cholesky(gram);
  matrix delta = matrix::Zero(p.cols(), y.cols());  // (PᵀP + λI)⁻¹ Pᵀ y = Pᵀ (PPᵀ + λI)⁻¹ y
  matrix& solved = primal ? delta : y;
  if (primal) {
    dense::add_transposed_product(1, x, y, delta);
  }
  dense::solve_lower(gram, solved);
  dense::solve_lower<true>(gram, solved);
  if (!primal) {
    dense::add_product(1, x, y, delta);
  }
  return delta.template cast<float>();
}

}  // namespace merge
}  // namespace kvmeld::inline v0
