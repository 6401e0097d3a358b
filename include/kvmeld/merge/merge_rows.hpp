// SPDX-License-Identifier: MIT
/// Rows as weighted sums of rows, in whatever storage, and those that it cannot hold.
#pragma once

#include <algorithm>  // std::min
#include <cmath>      // std::abs
#include <limits>     // std::numeric_limits
#include <span>

#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/memory/convert.hpp"
#include "kvmeld/merge/plan.hpp"

namespace kvmeld::inline v0 {
namespace merge {

/// `Σ weight · row + delta` in float, a chunk of elements at a time: `take(begin, n, sum)`.
template <class RowOf, class Take>
void each_chunk_of_sum(index_t dim, std::span<const merge_source> sources,
                       float merge_source::*weight, std::span<const float> delta, RowOf row_of,
                       Take take) {
  constexpr index_t chunk = 64;  // whole blocks of what is stored in blocks
  float sum[chunk], part[chunk];
  for (index_t begin = 0; begin < dim; begin += chunk) {
    const index_t n = std::min(chunk, dim - begin);
    for (index_t i = 0; i < n; ++i) {
      sum[i] = delta.empty() ? 0.0F : delta[as_size(begin + i)];
    }
    for (const merge_source& e : sources) {
      to_floats(row_of(e.source).from(begin), n, part);
      const float w = e.*weight;
      for (index_t i = 0; i < n; ++i) {
        sum[i] = detail::multiply_add(w, part[i], sum[i]);
      }
    }
    take(begin, n, sum);
  }
}

/// The first source's row becomes `Σ weight · row + delta`.
template <class RowOf>
void merge_rows(index_t dim, std::span<const merge_source> sources, float merge_source::*weight,
                std::span<const float> delta, RowOf row_of) {
  const auto anchor = row_of(sources.front().source);
  each_chunk_of_sum(dim, sources, weight, delta, row_of,
                    [&](index_t begin, index_t n, const float* sum) {
                      detail::store_row(sum, anchor.from(begin), n);
                    });
}

/// The least magnitude that a storage rounds to Inf, or holds in a block of NaN.
constexpr float least_overflow(storage type) {
  switch (type) {
    case storage::f32:
      return std::numeric_limits<float>::infinity();
    case storage::f16:
      return 65520;
    case storage::bf16:
      return 0x1.ffp127F;
    case storage::q8_0:
      return 127 * 65520.0F;
    default:
      return 8 * 65520.0F;
  }
}

/// Do the weights make a mean, or less? Its magnitude is at most the largest source's.
inline bool is_mean(std::span<const merge_source> sources, float merge_source::*weight) {
  float sum = 0;
  for (const merge_source& e : sources) {
    if (!(e.*weight >= 0)) {
      return false;
    }
    sum += e.*weight;
  }
  return sum <= 1 + 1e-6F;
}

/// Is the weighted sum of rows `[dim]`, and `delta`, finite in the storage of the rows?
template <class RowOf>
bool fits(storage type, index_t dim, std::span<const merge_source> sources,
          float merge_source::*weight, std::span<const float> delta, RowOf row_of) {
  if (delta.empty() && is_mean(sources, weight)) {
    return true;
  }
  const float limit = least_overflow(type);
  bool all = true;
  each_chunk_of_sum(dim, sources, weight, delta, row_of, [&](index_t, index_t n, const float* sum) {
    for (index_t i = 0; i < n; ++i) {
      all = all && std::abs(sum[i]) < limit;  // not NaN
    }
  });
  return all;
}

/// Are the key and the value of a row?
inline bool fits(const head_ref& head, std::span<const merge_source> sources,
                 std::span<const float> delta_k, std::span<const float> delta_v) {
  return fits(head.type().keys, head.dim(), sources, &merge_source::key_weight, delta_k,
              [&](index_t s) { return head.key(s); }) &&
         fits(head.type().values, head.own_value_dim(), sources, &merge_source::value_weight,
              delta_v, [&](index_t s) { return head.value(s); });
}

/// Leaves out of a plan what would not be finite in the storage of `head`: a row's corrections,
/// then all its sources but the anchor, which are evicted. Rows of weights or corrections that are
/// not finite themselves are left for `check` to refuse.
inline void keep_in_range(const head_ref& head, merge_plan& plan) {
  const auto finite = [](std::span<const float> delta) {
    return std::all_of(delta.begin(), delta.end(), [](float x) { return std::isfinite(x); });
  };
  for (index_t r = 0; r < plan.rows(); ++r) {
    const auto sources = plan.row(r);
    const auto delta_k = plan.key_correction(r), delta_v = plan.value_correction(r);
    const bool ordinary = std::all_of(sources.begin(), sources.end(), [](const merge_source& e) {
      return std::isfinite(e.key_weight) && std::isfinite(e.value_weight);
    });
    if (!ordinary || !finite(delta_k) || !finite(delta_v) ||
        fits(head, sources, delta_k, delta_v)) {
      continue;
    }
    plan.clear_corrections(r);
    if (!fits(head, sources, {}, {})) {
      plan.evict_others(r, head.log_mass(sources.front().source));
    }
  }
}

/// A removal whose merge would not be finite evicts instead.
inline void keep_in_range(const head_ref& head, slot_removal& d) {
  if (d.into != slot_removal::nowhere && !fits(head, d.sources(), {}, {})) {
    d = {.removed = d.removed, .measured = d.measured};
  }
}

}  // namespace merge
}  // namespace kvmeld::inline v0
