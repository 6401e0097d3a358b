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

/// Slots as they are fitted: `key, value [slots, dim]`, `log_mass [slots]`.
struct fitted_slots {
  dense::matrix key, value;  ///< each `[slots, dim]`
  dense::vector log_mass;    ///< `[slots]`
};

/// What `refine` brings down, and its gradient by the slots:
/// `mean_q ‖o_q − o*_q‖²/‖o*_q‖² + mass_weight · mean_q (Z_q − Z*_q)²`,
/// `o`, `Z` the output and log-sum-exp over the slots, `o*`, `Z*` those wanted.
struct attention_loss {
  const dense::matrix& queries;     ///< [queries, dim]
  const dense::attention& wanted;   ///< over the full cache
  score::logit_terms terms = 1.0F;  ///< of the layer
  float mass_weight = 0.03F;        ///< of the second term

  /// The loss; `gradient` is overwritten. Three products like attention's own, block by block.
  template <std::same_as<fitted_slots> Slots>
  double operator()(const Slots& x, Slots& gradient) const {
    using matrix = decltype(Slots::key);
    using vector = decltype(Slots::log_mass);
    gradient.key.setZero(x.key.rows(), x.key.cols());
    gradient.value.setZero(x.value.rows(), x.value.cols());
    gradient.log_mass.setZero(x.log_mass.size());
    constexpr Eigen::Index block = 128;
    const auto count = static_cast<float>(queries.rows());
    double loss = 0;
    const matrix &all = queries, &outputs = wanted.output;
    const vector& masses = wanted.log_sum_exp;
    matrix p, off, d, slope;
    for (Eigen::Index begin = 0; begin < all.rows(); begin += block) {
      const Eigen::Index rows = std::min(block, all.rows() - begin);
      const auto q = all.middleRows(begin, rows), output = outputs.middleRows(begin, rows);
      p.resize(rows, x.key.rows());
      dense::set_product_transposed(terms.scale(), q, x.key, p);
      if (terms.caps()) {
        terms.cap_logits(p.array());
        slope = 1 - (p.array() / terms.soft_cap()).square();
      }
      p.rowwise() += x.log_mass.transpose();
      const vector excess = softmax_rows(terms, begin, all.rows(), p) - masses.segment(begin, rows);
      off = -output;
      dense::add_product(1, p, x.value, off);
      const vector weight = output.rowwise().squaredNorm().array().max(1e-20F).inverse() / count;
      loss += double{(off.rowwise().squaredNorm().array() * weight.array()).sum()} +
              double{mass_weight / count * excess.squaredNorm()};

      off.array().colwise() *= 2 * weight.array();  // ∂loss/∂o
      dense::add_transposed_product(1, p, off, gradient.value);
      d.resize(rows, x.value.rows());
      dense::set_product_transposed(1, off, x.value, d);
      const vector mean = (d.array() * p.array()).rowwise().sum();  // of ∂loss/∂p, by p
      d.colwise() += 2 * mass_weight / count * excess - mean;
      d.array() *= p.array();  // ∂loss/∂logit
      gradient.log_mass += d.colwise().sum().transpose();
      if (terms.caps()) {
        d.array() *= slope.array();  // ∂loss/∂(scale · q·k)
      }
      dense::add_transposed_product(terms.scale(), d, q, gradient.key);
    }
    return loss;
  }
};

/// Adam (Kingma and Ba 2015; steps are relative to the mean norms of keys and values, log-mass in
/// nats) with a step that falls to 0; the slots of the least loss on the way are kept, so that
/// nothing gets worse. `pinned [slots]`: not 0: unchanged.
template <std::same_as<fitted_slots> Slots>
void refine(const attention_loss& loss, std::span<const char> pinned, index_t steps, float rate,
            Slots& x) {
  constexpr float first = 0.9F, second = 0.999F, tiny = 1e-12F;
  Slots gradient, mean = x;
  mean.key.setZero(), mean.value.setZero(), mean.log_mass.setZero();
  Slots square = mean, best = x;
  const auto rate_of = [&](const auto& rows) {  // in double: squares of floats overflow
    return rate * static_cast<float>(rows.template cast<double>().rowwise().norm().mean());
  };
  const float key_rate = rate_of(x.key), value_rate = rate_of(x.value);
  double least = std::numeric_limits<double>::infinity();
  for (index_t t = 0; t <= steps; ++t) {
    if (const double now = loss(x, gradient); now < least) {
      least = now, best = x;
    }
    const float left = 1 - static_cast<float>(t) / static_cast<float>(steps);
    const float unbias = std::sqrt(1 - std::pow(second, static_cast<float>(t + 1))) /
                         (1 - std::pow(first, static_cast<float>(t + 1)));
    for (Eigen::Index r = 0; r < x.key.rows(); ++r) {
      const auto move = [&](auto member, float by) {  // plain loops compile in no time
        const Eigen::Index n = (x.*member).cols();
        const float* const g = &(gradient.*member)(r, 0);
        float *const to = &(x.*member)(r, 0), *const m = &(mean.*member)(r, 0),
                     *const s = &(square.*member)(r, 0);
        for (Eigen::Index i = 0; i < n; ++i) {
          m[i] = first * m[i] + (1 - first) * g[i];
          s[i] = second * s[i] + (1 - second) * g[i] * g[i];
          to[i] -= left * by * unbias * m[i] / (std::sqrt(s[i]) + tiny);
        }
      };
      if (pinned[as_size(r)] == 0) {
        move(&Slots::key, key_rate), move(&Slots::value, value_rate), move(&Slots::log_mass, rate);
      }
    }
  }
  x = std::move(best);
}

}  // namespace merge
}  // namespace kvmeld::inline v0
