// SPDX-License-Identifier: MIT
/// Statistical leverage of un-rotated keys: outliers among a head's tokens, attended to or not.
#pragma once

#include <Eigen/Cholesky>
#include <algorithm>  // std::min
#include <span>
#include <vector>

#include "kvmeld/detail/arena.hpp"
#include "kvmeld/detail/product.hpp"
#include "kvmeld/memory/convert.hpp"
#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/score/dense.hpp"

namespace kvmeld::inline v0 {
namespace score {

/// `x_iᵀ (C + λI)⁻¹ x_i` of every key, `λ = ridge · trace(C)/dim`. `x [dim, keys]`, row by row, is
/// centred; of `covariance [dim, dim]` the upper triangle is its own, up to a factor. Both are
/// overwritten. `out [keys]`.
template <dense::stored X>
void leverage(X& x, dense::stored auto& covariance, float ridge, dense::stored auto& out) {
  using real = dense::scalar_of<X>;
  // A covariance of nothing (all keys alike) gives leverage 0, not 0/0.
  covariance.diagonal().array() += std::max(ridge * covariance.diagonal().mean(), 1e-20F);
  // Column by column, row by row's upper triangle is the lower one: L.
  using columns = Eigen::Matrix<real, Eigen::Dynamic, Eigen::Dynamic>;
  Eigen::Map<columns> lower(covariance.data(), covariance.rows(), covariance.cols());
  const Eigen::LLT<Eigen::Ref<columns>> factor(lower);
  dense::solve_lower(covariance, x);  // L⁻¹ x: its columns' squares are wanted
  out = x.colwise().squaredNorm().transpose();
}

/// Keys that are transposed at a time, a line of each element.
inline constexpr index_t transposed_keys = 16;

/// Keys as they were before RoPE, a column each: `x [dim, length]`. `keys [transposed_keys, dim]`
/// is scratch.
inline void unrotated_keys(const kv_head auto& head, dense::stored auto& x, float* keys) {
  const index_t n = head.length(), dim = head.dim();
  rotation turn(head.spec().rope, dim);
  for (index_t first = 0; first < n; first += transposed_keys) {
    const index_t count = std::min(transposed_keys, n - first);
    for (index_t r = 0; r < count; ++r) {
      float* const key = keys + std::ptrdiff_t{r} * dim;
      to_floats(head.key(first + r), dim, key);
      turn.by(-head.position(first + r));
      turn(key);
    }
    x.middleCols(first, count) = Eigen::Map<const dense::matrix>(keys, count, dim).transpose();
  }
}

/// Leverage `[length]` of a head's keys as they were before RoPE, centred: `x_iᵀ (XᵀX + λI)⁻¹ x_i`.
/// Every slot counts once, whatever it stands for. A view of `scratch`, which grows at first use.
inline std::span<float> leverage_of_keys(const kv_head auto& head, float ridge,
                                         std::vector<float>& scratch) {
  const index_t n = head.length(), dim = head.dim();
  const auto slots = as_size(n), d = as_size(dim);
  detail::arena parts(scratch, slots + (slots + d + transposed_keys) * d);
  auto leverage = parts.column(n);
  auto x = parts.rows(dim, n), covariance = parts.rows(dim, dim);
  unrotated_keys(head, x, parts.rows(transposed_keys, dim).data());
  for (index_t i = 0; i < dim; ++i) {
    x.row(i).array() -= x.row(i).mean();
  }
  dense::set_product_transposed(1, x, x, covariance);
  score::leverage(x, covariance, ridge, leverage);
  return {leverage.data(), slots};
}

}  // namespace score
}  // namespace kvmeld::inline v0
