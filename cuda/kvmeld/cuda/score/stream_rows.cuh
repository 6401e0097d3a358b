// SPDX-License-Identifier: MIT
/// What a block of `stream_columns` holds.
#pragma once

#include "kvmeld/cuda/score/stream_shape.cuh"
#include "kvmeld/cuda/score/stream_tiles.cuh"

namespace kvmeld::cuda::detail {

/// Of a warp's rows: their lowest and highest position, and whether any has a log-mass.
struct row_bounds {
  index_t first = never, last = -1;
  bool heavy = false;
};

/// This warp's rows, queries or slots, into registers; the block's positions and masses over the
/// scale into shared memory. Absent rows see no slot, or are seen by no query.
template <class Shape, bool OfQueries, class Scalar, class Queries>
KVMELD_DEVICE row_bounds hold_rows(const cache_view<Scalar>& cache, const Queries& queries,
                                   const grouped_queries& grouped, index_t r0, index_t all_rows,
                                   typename Shape::fragments& rows,
                                   shared_array<index_t, Shape::rows>& row_position,
                                   shared_array<float, Shape::rows>& row_mass) {
  row_bounds own;
  const index_t h = cache.head();
  [[maybe_unused]] const index_t next_position = cache.next_position[h];
  [[maybe_unused]] const auto keys = cache.keys.of(h);
  unrolled<Shape::row_tiles, 2>([&](index_t m, index_t i) {
    const index_t at = Shape::row(m, 2 * i), r = r0 + at;
    const Scalar* from = nullptr;
    index_t position = OfQueries ? -1 : never;
    float mass = 0;
    if constexpr (OfQueries) {
      const auto place = grouped.at(r);
      if (r < all_rows && queries.has(place.i)) {
        from = queries.at(h, place.g, place.i);
        position = queries.position_of(h, place.i, next_position);
      }
    } else if (r < all_rows) {
      from = keys.at(r), position = cache.position_of(h)[r];
      mass = cache.log_mass_of(h)[r] / cache.scale;
    }
    if (from != nullptr) {
      own.first = position < own.first ? position : own.first;
      own.last = position > own.last ? position : own.last;
      own.heavy = own.heavy || mass != 0;
    }
    if (lane() % 4 == 0) {
      row_position[at] = position, row_mass[at] = mass;
    }
    Shape::hold(rows, m, i, from, cache.dim);
  });
  return {reduce_min(own.first), reduce_max(own.last), ballot(own.heavy) != 0};
}

}  // namespace kvmeld::cuda::detail
