// SPDX-License-Identifier: MIT
/// Rows of a cache as float matrices: in place where they are already so, converted otherwise.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::clamp

#include "kvmeld/memory/convert.hpp"

namespace kvmeld::inline v0::detail {

/// Slots `[rows, dim]` in float.
using tile = Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>,
                        Eigen::Unaligned, Eigen::OuterStride<>>;

/// Rows between two prefetches.
inline constexpr index_t prefetch_distance = 8;

/// Prefetches the first lines of the row `prefetch_distance` behind `row`: processors follow what
/// is read in order by themselves, but start anew at every page.
template <class Scalar>
void prefetch_rows(const Scalar* row, std::ptrdiff_t stride) {
  constexpr std::ptrdiff_t line = 64 / sizeof(Scalar), lines = 4;
  const auto* const next = row + prefetch_distance * stride;
  for (std::ptrdiff_t i = 0; i < lines; ++i) {
    Eigen::internal::prefetch(next + i * line);
  }
}

/// `count` rows `row_of(first) ...` of a cache; `buffer [count, dim]` is used when they are not
/// evenly spaced floats.
template <class RowOf>
tile load_tile(RowOf row_of, index_t first, index_t count, index_t dim, float* buffer) {
  if (const float* const base = floats_in(row_of(first))) {
    const std::ptrdiff_t stride = count > 1 ? floats_in(row_of(first + 1)) - base : dim;
    bool even = stride >= dim;
    for (index_t i = 2; even && i < count; ++i) {
      even = floats_in(row_of(first + i)) == base + i * stride;  // a paged view may jump
    }
    if (even) {
      return {base, count, dim, Eigen::OuterStride<>(stride)};
    }
  }
  const std::ptrdiff_t stride = count > 1 ? row_of(first + 1).data - row_of(first).data : 0;
  for (index_t i = 0; i < count; ++i) {
    const auto row = row_of(first + i);
    prefetch_rows(row.data, stride);
    to_floats(row, dim, buffer + std::ptrdiff_t{i} * dim);
  }
  return {buffer, count, dim, Eigen::OuterStride<>(dim)};
}

inline tile even_tile(const head_rows& l, index_t first, index_t count, index_t dim) {
  return {reinterpret_cast<const float*>(l.slot(first)), count, dim,
          Eigen::OuterStride<>(l.row / std::ptrdiff_t{sizeof(float)})};
}

/// Keys `first` to `first + count` − 1; `buffer [count, dim]` as above.
inline tile load_keys(const head_ref& head, index_t first, index_t count, float* buffer) {
  return head.even_keys()  // known without reading every address
             ? even_tile(head.keys(), first, count, head.dim())
             : load_tile([&](index_t s) { return head.key(s); }, first, count, head.dim(), buffer);
}

/// ... values; `buffer [count, value_dim]`.
inline tile load_values(const head_ref& head, index_t first, index_t count, float* buffer) {
  const index_t dim = head.value_dim();
  return head.even_values()
             ? even_tile(head.values(), first, count, dim)
             : load_tile([&](index_t s) { return head.value(s); }, first, count, dim, buffer);
}

/// Floats of the longest row, the most that one buffer on the stack holds: no frame is larger than
/// 32 KiB.
inline constexpr index_t row_floats = 4096;
/// Slots at a time where a head's keys are read tile by tile, and the floats that these have.
inline constexpr index_t max_tile_slots = 64, tile_floats = row_floats;

/// Calls `use(first, tile)` for the keys of all slots, at most `max_tile_slots` at a time. Nothing
/// is allocated.
template <class Use>
KVMELD_NOINLINE void each_tile_of_keys(const head_ref& head, Use use) {
  float buffer[tile_floats];
  const index_t n = head.length(), dim = head.dim(),
                rows = std::clamp(tile_floats / dim, index_t{1}, max_tile_slots);
  for (index_t first = 0; first < n; first += rows) {
    use(first, load_keys(head, first, std::min(rows, n - first), buffer));
  }
}

}  // namespace kvmeld::inline v0::detail
