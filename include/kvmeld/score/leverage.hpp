// SPDX-License-Identifier: MIT
/// Statistical leverage of un-rotated keys: outliers among a head's tokens, attended to or not.
#pragma once

#include <algorithm>  // std::min
#include <limits>     // std::numeric_limits
#include <span>
#include <vector>

#include "kvmeld/detail/product.hpp"
#include "kvmeld/memory/convert.hpp"
#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/score/dense.hpp"

namespace kvmeld::inline v0 {
namespace score {

/// `leverage`: keys and dimensions that are multiplied at a time. Of what is symmetric or a
/// triangle, three quarters are computed at 128 dimensions.
inline constexpr index_t leverage_keys = 128, leverage_strip = 64;

/// What `leverage` takes of an arena in addition to its keys, in floats.
inline constexpr std::size_t leverage_floats(index_t dim) {
  return as_size(dim) * (2 * as_size(dim) + 1) + std::size_t{leverage_keys} * leverage_strip;
}

/// `x_iᵀ (XᵀX + λI)⁻¹ x_i = ‖L⁻¹ x_i‖²` with `L Lᵀ = XᵀX + λI`, `λ = ridge · trace(XᵀX)/dim`, of
/// the first keys of `x [keys, dim]`, as many as `out` has. All of them make up X; they are centred
/// here.
template <dense::stored X>
void leverage(X& x, float ridge, detail::arena scratch, dense::stored auto& out) {
  const auto dim = static_cast<index_t>(x.cols());
  auto covariance = scratch.rows(dim, dim), inverse = scratch.rows(dim, dim);
  auto mean = scratch.column(dim);
  mean = x.colwise().mean().transpose();
  x.rowwise() -= mean.transpose();
  covariance.setZero();
  dense::add_gram(x, covariance);
  // A covariance of nothing (all keys alike) gives leverage 0, not 0/0.
  covariance.diagonal().array() += std::max(ridge * covariance.diagonal().mean(), 1e-20F);
  dense::cholesky(covariance);
  inverse.setIdentity();
  dense::solve_lower(covariance, inverse);  // once, so that all keys are one matrix product
  out.setZero();
  float* const products = scratch.rows(leverage_keys, leverage_strip).data();
  for (index_t first = 0; first < out.size(); first += leverage_keys) {
    const auto count = std::min(leverage_keys, static_cast<index_t>(out.size()) - first);
    for (index_t i = 0; i < dim; i += leverage_strip) {
      const auto width = std::min(leverage_strip, dim - i);
      Eigen::Map<dense::matrix> part(products, count, width);
      dense::set_product_transposed(1, x.block(first, 0, count, i + width),
                                    inverse.block(i, 0, width, i + width), part);
      out.segment(first, count) += part.rowwise().squaredNorm();
    }
  }
}

/// A key as it was before RoPE, `out [dim]`. `turn`: the head's own rotation.
inline void unrotated_key(const kv_head auto& head, index_t slot, rotation& turn, float* out) {
  to_floats(head.key(slot), head.dim(), out);
  turn.by(-head.position(slot));
  turn(out);
}

/// Leverage `[length]` of a head's keys as they were before RoPE, of the slots that are
/// `wanted(s)`; others have minus infinity. Every slot counts once in the covariance, whatever
/// it stands for. A view of `scratch`, which grows at first use.
template <class Wanted>
std::span<float> leverage_of_keys(const kv_head auto& head, float ridge, Wanted wanted,
                                  std::vector<float>& scratch) {
  const index_t n = head.length(), dim = head.dim();
  detail::arena parts(scratch, 2 * as_size(n) + as_size(n) * as_size(dim) + leverage_floats(dim));
  auto leverage = parts.column(n), of_wanted = parts.column(n);
  auto x = parts.rows(n, dim);
  rotation turn(head.spec().rope, dim);
  index_t front = 0, back = n;  // the wanted ones first
  for (index_t s = 0; s < n; ++s) {
    unrotated_key(head, s, turn, &x(wanted(s) ? front++ : --back, 0));
  }
  Eigen::Map<dense::vector> some(of_wanted.data(), front);
  score::leverage(x, ridge, parts, some);
  index_t next = 0;
  for (index_t s = 0; s < n; ++s) {
    leverage[s] = wanted(s) ? some[next++] : -std::numeric_limits<float>::infinity();
  }
  return {leverage.data(), as_size(n)};
}

}  // namespace score
}  // namespace kvmeld::inline v0
