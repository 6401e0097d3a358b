// SPDX-License-Identifier: MIT
/// Gradient steps on slots' keys, values and log-mass, so that attention over them comes closer to
/// the full cache's on reference queries: fold's fifth part.
#pragma once

#include <cmath>     // std::sqrt
#include <concepts>  // std::same_as
#include <span>

#include "kvmeld/merge/fit.hpp"
#include "kvmeld/score/softmax.hpp"

namespace kvmeld {
inline namespace v0 {
namespace merge {

/// Slots as they are fitted: `key, value [slots, dim]`, `log_mass [slots]`.
struct fitted_slots {
  dense::matrix key, value;
  dense::vector log_mass;
};

/// What `refine` brings down, and its gradient by the slots:
/// `mean_q ‖o_q − o*_q‖²/‖o*_q‖² + mass_weight · mean_q (Z_q − Z*_q)²`,
/// `o`, `Z` the output and log-sum-exp over the slots, `o*`, `Z*` those wanted.
struct attention_loss {
  const dense::matrix& queries;  ///< [queries, dim]
  const dense::attention& wanted;
  float scale = 1, mass_weight = 0.03F;

  /// The loss; `gradient` is overwritten. Three products like attention's own, block by block.
  double operator()(const std::same_as<fitted_slots> auto& x, fitted_slots& gradient) const {
    gradient.key.setZero(x.key.rows(), x.key.cols());
    gradient.value.setZero(x.value.rows(), x.value.cols());
    gradient.log_mass.setZero(x.log_mass.size());
    constexpr Eigen::Index block = 128;
    const auto count = static_cast<float>(queries.rows());
    double loss = 0;
    dense::matrix p, off, d;
    dense::vector z;
    for (Eigen::Index begin = 0; begin < queries.rows(); begin += block) {
      const Eigen::Index rows = std::min(block, queries.rows() - begin);
      const auto q = queries.middleRows(begin, rows);
      p.resize(rows, x.key.rows());
      dense::set_product_transposed(scale, q, x.key, p);
      p.rowwise() += x.log_mass.transpose();
      z.resize(rows);
      for (Eigen::Index r = 0; r < rows; ++r) {
        score::softmax<> all;
        all.take(p.row(r).array());
        p.row(r) /= all.sum;
        z[r] = all.log_sum_exp();
      }

      off = -wanted.output.middleRows(begin, rows);
      dense::add_product(1, p, x.value, off);
      const dense::vector excess = z - wanted.log_sum_exp.segment(begin, rows);
      const dense::vector weight = wanted.output.middleRows(begin, rows)
                                       .rowwise()
                                       .squaredNorm()
                                       .array()
                                       .max(1e-20F)
                                       .inverse() /
                                   count;
      loss += double{(off.rowwise().squaredNorm().array() * weight.array()).sum()} +
              double{mass_weight / count * excess.squaredNorm()};

      off.array().colwise() *= 2 * weight.array();  // ∂loss/∂o
      dense::add_transposed_product(1, p, off, gradient.value);
      d.resize(rows, x.value.rows());
      dense::set_product_transposed(1, off, x.value, d);
      const dense::vector mean = (d.array() * p.array()).rowwise().sum();  // of ∂loss/∂p, by p
      d.colwise() += 2 * mass_weight / count * excess - mean;
      d.array() *= p.array();  // ∂loss/∂logit
      gradient.log_mass += d.colwise().sum().transpose();
      dense::add_transposed_product(scale, d, q, gradient.key);
    }
    return loss;
  }
};

/// Adam (Kingma and Ba 2015; steps are relative to the mean norms of keys
/// and values, log-mass in nats) with a step that falls to 0; the slots of the least loss on the
/// way are kept, so that nothing gets worse. `pinned [slots]`: not 0: unchanged.
void refine(const attention_loss& loss, std::span<const char> pinned, index_t steps, float rate,
            std::same_as<fitted_slots> auto& x) {
  constexpr float first = 0.9F, second = 0.999F, tiny = 1e-12F;
  fitted_slots gradient,
      mean{dense::matrix::Zero(x.key.rows(), x.key.cols()),
           dense::matrix::Zero(x.value.rows(), x.value.cols()),
           dense::vector::Zero(x.log_mass.size())},
      square = mean, best = x;
  const auto rate_of = [&](const dense::matrix& rows) {  // in double: squares of floats overflow
    return rate * static_cast<float>(rows.cast<double>().rowwise().norm().mean());
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
    const auto move = [&](auto to, auto g, auto m, auto s, float by) {
      m = first * m + (1 - first) * g;
      s = second * s + (1 - second) * g * g;
      to -= left * by * unbias * m / (s.sqrt() + tiny);
    };
    for (Eigen::Index r = 0; r < x.key.rows(); ++r) {
      if (pinned[static_cast<std::size_t>(r)] == 0) {
        move(x.key.row(r).array(), gradient.key.row(r).array(), mean.key.row(r).array(),
             square.key.row(r).array(), key_rate);
        move(x.value.row(r).array(), gradient.value.row(r).array(), mean.value.row(r).array(),
             square.value.row(r).array(), value_rate);
        move(x.log_mass.template segment<1>(r).array(), gradient.log_mass.segment<1>(r).array(),
             mean.log_mass.segment<1>(r).array(), square.log_mass.segment<1>(r).array(), rate);
      }
    }
  }
  x = std::move(best);
}

}  // namespace merge
}  // namespace v0
}  // namespace kvmeld
