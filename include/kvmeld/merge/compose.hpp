// SPDX-License-Identifier: MIT
/// Two plans as one.
#pragma once

#include <vector>

#include "kvmeld/merge/plan.hpp"

namespace kvmeld {
inline namespace v0 {
namespace merge {

/// `Δ = W₂ Δ₁ + Δ₂`, `[rows of second, dim]`; empty when neither corrects.
template <class CorrectionOf>
std::vector<float> compose_corrections(const merge_plan& second, const merge_plan& first,
                                       float merge_source::*weight, std::size_t dim,
                                       CorrectionOf correction_of) {
  if (correction_of(first).empty() && correction_of(second).empty()) {
    return {};
  }
  const auto row = [&](const merge_plan& p, index_t r) {
    const std::span<const float> all = correction_of(p);
    return all.empty() ? all : all.subspan(static_cast<std::size_t>(r) * dim, dim);
  };
  std::vector<float> delta(static_cast<std::size_t>(second.rows()) * dim);
  for (index_t r = 0; r < second.rows(); ++r) {
    float* d = delta.data() + static_cast<std::size_t>(r) * dim;
    for (const merge_source& e : second.row(r)) {
      const auto inner = row(first, e.source);
      for (std::size_t i = 0; i < inner.size(); ++i) {
        d[i] += e.*weight * inner[i];
      }
    }
    const auto own = row(second, r);
    for (std::size_t i = 0; i < own.size(); ++i) {
      d[i] += own[i];
    }
  }
  return delta;
}

}  // namespace merge

/// First `first`, then `second`, as one plan: `W = W₂ W₁`, `Δ = W₂ Δ₁ + Δ₂`.
/// Refused when the product's anchors would not ascend, or when the row counts do not fit.
inline merge_plan compose(const merge_plan& second, const merge_plan& first) {
  expects(second.length() == first.rows(), "compose: expected a second plan of ", first.rows(),
          " slots, got ", second.length());
  expects(!first.has_correction() || !second.has_correction() || first.dim() == second.dim(),
          "compose: expected corrections of the same dim, got ", first.dim(), " and ",
          second.dim());
  check(first), check(second);
  merge_plan product;
  product.reset(first.length());
  for (index_t r = 0; r < second.rows(); ++r) {
    for (const merge_source& outer : second.row(r)) {
      for (const merge_source& inner : first.row(outer.source)) {
        product.add({inner.source, outer.key_weight * inner.key_weight,
                     outer.value_weight * inner.value_weight});
      }
    }
    product.end_row(second.log_mass(r));
  }
  const index_t dim = first.has_correction() ? first.dim() : second.dim();
  const auto delta = [&](float merge_source::*weight, auto correction_of) {
    return merge::compose_corrections(second, first, weight, static_cast<std::size_t>(dim),
                                      correction_of);
  };
  const auto keys =
      delta(&merge_source::key_weight, [](const merge_plan& p) { return p.key_corrections(); });
  const auto values =
      delta(&merge_source::value_weight, [](const merge_plan& p) { return p.value_corrections(); });
  if (!keys.empty()) {
    product.correct_keys(keys, dim);
  }
  if (!values.empty()) {
    product.correct_values(values, dim);
  }
  check(product);
  return product;
}

}  // namespace v0
}  // namespace kvmeld
