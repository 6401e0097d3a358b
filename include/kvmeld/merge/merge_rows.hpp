// SPDX-License-Identifier: MIT
/// Rows as weighted sums of rows, in whatever storage.
#pragma once

#include <algorithm>  // std::min
#include <span>

#include "kvmeld/detail/multiply_add.hpp"
#include "kvmeld/memory/convert.hpp"
#include "kvmeld/merge/merge_source.hpp"

namespace kvmeld {
inline namespace v0 {
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
      sum[i] = delta.empty() ? 0.0F : delta[static_cast<std::size_t>(begin + i)];
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

/// `x ← Σ weight · row + delta`: the sources may include `x` itself.
template <class Scalar, class RowOf>
void merge_rows(row<Scalar> x, index_t dim, std::span<const merge_source> sources,
                float merge_source::*weight, std::span<const float> delta, RowOf row_of) {
  each_chunk_of_sum(dim, sources, weight, delta, row_of,
                    [&](index_t begin, index_t n, const float* sum) {
                      detail::store_row(sum, x.from(begin), n);
                    });
}

}  // namespace merge
}  // namespace v0
}  // namespace kvmeld
