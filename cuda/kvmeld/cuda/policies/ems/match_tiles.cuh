// SPDX-License-Identifier: MIT
/// EMS: the centre most like every entry that is to be merged, on tensor cores.
#pragma once

#include "kvmeld/cuda/policies/ems/match.cuh"
#include "kvmeld/cuda/search/similarities.cuh"

namespace kvmeld::cuda::detail {

/// Eq. 5 for rows of 16 bits. A block keeps keys and values of a tile of removed entries, and those
/// of centres, in the order of positions, stream by; a lane keeps the best of its own columns. By
/// the products of keys and of values over the lengths of the centre's: what is the removed
/// entry's alone is left to the end. Reads K and V of removed entries once, and of centres once per
/// tile of them.
template <class Scalar, index_t Dim>
struct redundant_tiles {
  using tiles = tile_stream<Scalar, 2 * Dim, Dim <= 128 ? 128 : 64>;
  static constexpr index_t threads = tiles::threads, resident = 1, rows = tiles::rows;
  struct shared_memory {
    typename tiles::shared_memory rows;
    shared_array<float, 2 * tiles::columns> number;  // over both lengths; −1: none
  };

  cache_view<Scalar> cache;
  entry_scratch entries;
  keep_evict_partition from;
  bool aligned;

  /// Grid: heads, tiles of removed slots.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), e0 = block_y() * rows;
    const index_t count = from.removed_count[h], centres = from.kept_count[h];
    if (e0 >= count) {
      return;
    }
    const index_t* const away = from.removed + cache.slot(h, 0);
    const index_t* const stay = from.kept + cache.slot(h, 0);
    const auto keys = cache.keys.of(h), values = cache.values.of(h);
    const auto rows_of = [&](const index_t* slots, index_t n) {
      return streamed_rows{[&keys, &values, slots](index_t i, index_t plane) {
                             return plane == 0 ? keys.at(slots[i]) : values.at(slots[i]);
                           },
                           n, cache.dim, aligned};
    };
    nearest_columns<tiles, true> best;
    if (centres > 0) {
      tiles::template keep<2>(shared.rows, e0, rows_of(away, count));
      meet(shared, h, stay, rows_of(stay, centres), best);
    }
    const candidate most = best.of_rows(shared.rows);
    const index_t r = thread_index(), e = e0 + r;
    if (r < rows && e < count) {
      const bool none = most == 0;  // or all are NaN
      from.nearest.into[cache.slot(h, e)] = centres > 0 ? stay[none ? 0 : most_slot(most)] : -1;
      from.nearest.similarity[cache.slot(h, e)] =
          none ? lowest_score
               : number_of(static_cast<unsigned>(most >> 32)) * number_of_slot(h, away[e]);
    }
  }

 private:
  KVMELD_DEVICE float number_of_slot(index_t h, index_t s) const {
    const float lengths =
        entries.key_length[cache.slot(h, s)] * entries.value_length[cache.slot(h, s)];
    return lengths > 0 ? 1.0F / lengths : 0.0F;
  }

  template <class Rows>
  KVMELD_DEVICE void meet(shared_memory& shared, index_t h, const index_t* stay,
                          const Rows& centres, nearest_columns<tiles, true>& best) const {
    typename tiles::products key;
    tiles::template stream<2>(
        shared.rows, centres,
        [&](index_t turn, index_t column, index_t i) {
          shared.number[turn * tiles::columns + column] =
              i < 0 ? -1.0F : number_of_slot(h, stay[i]);
        },
        [&](index_t turn, index_t column) {
          return shared.number[turn * tiles::columns + column] < 0 ? no_score : 0.0F;
        },
        [&](const typename tiles::products& x, index_t turn, index_t first, index_t plane) {
          if (plane == 0) {
            keep_products(key, x);
            return;
          }
          typename tiles::products both;
          each_product([&](index_t m, index_t n, index_t j) {
            both[m][n][j] = redundancy(key[m][n][j], x[m][n][j]);
          });
          best.take(
              both, [&](index_t column) { return first + column; },
              [&](float product, index_t, index_t, index_t column) {
                return product * shared.number[turn * tiles::columns + column];
              });
        });
  }

  template <class Use>
  KVMELD_DEVICE static void each_product(Use use) {
    unrolled<tiles::row_tiles, tiles::column_tiles, 4>(
        [&](index_t m, index_t n, index_t j) { use(m, n, j); });
  }
  KVMELD_DEVICE static void keep_products(typename tiles::products& to,
                                          const typename tiles::products& x) {
    each_product([&](index_t m, index_t n, index_t j) { to[m][n][j] = x[m][n][j]; });
  }
};

}  // namespace kvmeld::cuda::detail
