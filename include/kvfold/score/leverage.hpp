/// Statistical leverage of un-rotated keys: outliers among a head's tokens, attended to or not.
#pragma once

#include <Eigen/Cholesky>

#include "kvfold/memory/rope.hpp"
#include "kvfold/score/dense.hpp"

namespace kvfold {
inline namespace v0 {
namespace score {

/// Keys as they were before RoPE, `[length, dim]`.
dense::matrix unrotated_keys(const kv_head auto& head, const rope& rope) {
  dense::matrix x = dense::keys(head);
  rotation turn(rope, head.dim());
  for (index_t s = 0; s < head.length(); ++s) {
    turn.by(-head.position(s));
    turn(&x(s, 0));
  }
  return x;
}

/// `x_iᵀ (C + λI)⁻¹ x_i` of every key, `λ = ridge · trace(C)/dim`. `x [dim, keys]`, row by row, is
/// centred; of `covariance [dim, dim]`, column by column, the lower triangle is its own, up to a
/// factor. Both are overwritten. `out [keys]`.
void leverage(dense::stored auto& x, dense::stored auto& covariance, float ridge,
              dense::stored auto& out) {
  // A covariance of nothing (all keys alike) gives leverage 0, not 0/0.
  covariance.diagonal().array() += std::max(ridge * covariance.diagonal().mean(), 1e-20F);
  const Eigen::LLT<Eigen::Ref<Eigen::MatrixXf>> factor(covariance);
  factor.matrixL().solveInPlace(x);  // L⁻¹ x: its columns' squares are wanted
  out = x.colwise().squaredNorm().transpose();
}

/// Leverage `[length]` of a head's keys as they were before RoPE, centred: `x_iᵀ (XᵀX + λI)⁻¹ x_i`.
dense::vector leverage_of_keys(const kv_head auto& head, const rope& rope, float ridge) {
  dense::vector out(head.length());
  dense::matrix x = unrotated_keys(head, rope).transpose();  // [dim, length]
  x.colwise() -= x.rowwise().mean().eval();
  dense::matrix products(x.rows(), x.rows());
  dense::set_product_transposed(1, x, x, products);
  Eigen::Map<Eigen::MatrixXf> covariance(products.data(), x.rows(), x.rows());
  leverage(x, covariance, ridge, out);
  return out;
}

}  // namespace score
}  // namespace v0
}  // namespace kvfold
