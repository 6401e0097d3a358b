// SPDX-License-Identifier: MIT
/// EMS: the centre most like every entry that is to be merged, and what they are merged into.
#pragma once

#include "kvmeld/cuda/merge/weigh_rows.cuh"
#include "kvmeld/cuda/policies/ems/rule.cuh"
#include "kvmeld/cuda/search/similarities.cuh"

namespace kvmeld::cuda::detail {

/// Eq. 5: R = cos(k_a, k_b) · cos(v_a, v_b) from the two, negative when both are.
KVMELD_HD inline float redundancy(float keys, float values) {
  return keys < 0 && values < 0 ? -keys * values : keys * values;
}

/// Eq. 5, of rows of the cache or of `Row`s made of them. A block keeps keys and values of a tile
/// of removed entries, and those of centres, in the order of positions, stream by; a lane keeps the
/// best of its own columns. By the products of keys and of values over the lengths of the centre's:
/// what is the removed entry's alone is left to the end; of floats by cosines, for ties are exact
/// then. Reads K and V of removed entries once, and
/// of centres once per tile of them.
template <class Scalar, index_t Dim, class Row = Scalar>
struct redundant_tiles {
  using tiles = tile_stream<Row, 2 * Dim, Dim <= 128 ? 128 : 64>;
  static constexpr index_t threads = tiles::threads, resident = 1, rows = tiles::rows;
  static constexpr index_t turns = 2 * tiles::columns, planes = tiles::matrix ? 1 : 2;
  struct shared_memory {
    typename tiles::shared_memory rows;
    shared_array<float, planes * turns> number;  // over both lengths, or these; −1: none
  };

  cache_view<Scalar> cache;
  plane<Row> key_rows, value_rows;
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
    const auto keys = key_rows.of(h), values = value_rows.of(h);
    const auto rows_of = [&](const index_t* slots, index_t n) {
      return streamed_rows{[&keys, &values, slots](index_t i, index_t plane) {
                             return plane == 0 ? keys.at(slots[i]) : values.at(slots[i]);
                           },
                           n, cache.dim, aligned};
    };
    nearest_columns<tiles, true> best;
    if (centres > 0) {
      tiles::template keep<2>(shared.rows, e0, rows_of(away, count));
      meet(shared, h, e0, away, count, stay, rows_of(stay, centres), best);
    }
    const candidate most = best.of_rows(shared.rows);
    const index_t r = thread_index(), e = e0 + r;
    if (r < rows && e < count) {
      const bool none = most == 0;  // or all are NaN
      from.nearest.into[cache.slot(h, e)] = centres > 0 ? stay[none ? 0 : most_slot(most)] : -1;
      from.nearest.similarity[cache.slot(h, e)] =
          none ? lowest_score
               : number_of(static_cast<unsigned>(most >> 32)) *
                     (tiles::matrix ? number_of_slot(h, away[e]) : 1.0F);
    }
  }

 private:
  KVMELD_DEVICE float number_of_slot(index_t h, index_t s) const {
    const float lengths =
        entries.key_length[cache.slot(h, s)] * entries.value_length[cache.slot(h, s)];
    return lengths > 0 ? 1.0F / lengths : 0.0F;
  }

  template <class Rows>
  KVMELD_DEVICE void meet(shared_memory& shared, index_t h, index_t e0, const index_t* away,
                          index_t count, const index_t* stay, const Rows& centres,
                          nearest_columns<tiles, true>& best) const {
    [[maybe_unused]] const float* const lengths[2] = {entries.key_length + cache.slot(h, 0),
                                                      entries.value_length + cache.slot(h, 0)};
    [[maybe_unused]] float own[planes][tiles::row_tiles][2];
    if constexpr (!tiles::matrix) {
      unrolled<planes, tiles::row_tiles, 2>([&](index_t plane, index_t m, index_t i) {
        const index_t e = e0 + tiles::row(m, 2 * i);
        own[plane][m][i] = lengths[plane][away[e < count ? e : e0]];
      });
    }
    typename tiles::products key;
    tiles::template stream<2>(
        shared.rows, centres,
        [&](index_t turn, index_t column, index_t i) {
          const index_t at = turn * tiles::columns + column;
          if constexpr (tiles::matrix) {
            shared.number[at] = i < 0 ? -1.0F : number_of_slot(h, stay[i]);
          } else {
            unrolled<planes>([&](index_t plane) {
              shared.number[plane * turns + at] = i < 0 ? -1.0F : lengths[plane][stay[i]];
            });
          }
        },
        [&](index_t turn, index_t column) {
          return shared.number[turn * tiles::columns + column] < 0 ? no_score : 0.0F;
        },
        [&](const typename tiles::products& x, index_t turn, index_t first, index_t plane) {
          const index_t at = turn * tiles::columns;
          const auto number = [&](index_t m, index_t n, index_t j) {
            if constexpr (tiles::matrix) {
              return x[m][n][j];
            } else {
              const float theirs = shared.number[plane * turns + at + tiles::column(n, j)],
                          both = own[plane][m][j / 2] * theirs;
              return both > 0 ? x[m][n][j] / both : theirs < 0 ? no_score : 0.0F;
            }
          };
          if (plane == 0) {
            each_product([&](index_t m, index_t n, index_t j) { key[m][n][j] = number(m, n, j); });
            return;
          }
          typename tiles::products both;
          each_product([&](index_t m, index_t n, index_t j) {
            both[m][n][j] = redundancy(key[m][n][j], number(m, n, j));
          });
          best.take(
              both, [&](index_t column) { return first + column; },
              [&](float r, index_t, index_t, index_t column) {
                return tiles::matrix ? r * shared.number[at + column] : r;
              });
        });
  }

  template <class Use>
  KVMELD_DEVICE static void each_product(Use use) {
    unrolled<tiles::row_tiles, tiles::column_tiles, 4>(use);
  }
};

/// A row of a plan: with S the members' weights (all equal if they sum to 0), the key
/// Σ S_i k_i/‖k_i‖ made as long as `norm`, the centre's own; the value Σ S_i v_i / Σ S_i.
struct entry_merge {
  double total, length;  ///< of the sum of keys
  float norm;
  index_t size;

  /// By a warp, that all take part in: `member(i)`, `weight(s)` and `key_length(s)`. A lane sums
  /// `own` elements of the keys at once.
  template <class Scalar, class Member, class Weight, class Length>
  KVMELD_DEVICE static entry_merge of(const cache_view<Scalar>& cache, index_t h, index_t size,
                                      float norm, Member member, Weight weight, Length key_length) {
    constexpr index_t own = max_dim / 32;
    double sum = 0;
    for (index_t i = lane(); i < size; i += 32) {
      sum += static_cast<double>(weight(member(i)));
    }
    entry_merge x{reduce_sum(sum), 0, norm, size};
    const auto keys = cache.keys.of(h);
    double square = 0;
    KVMELD_ROLLED
    for (index_t first = 0; first < cache.dim; first += 32 * own) {
      double key[own] = {};
      for (index_t i = 0; i < size; ++i) {
        const index_t s = member(i);
        const double unit = x.unit(weight(s), key_length(s));
        const Scalar* const row = keys.at(s);
        unrolled<own>([&](index_t j) {
          const index_t e = first + j * 32 + lane();
          key[j] += e < cache.dim ? unit * static_cast<double>(to_float(row[e])) : 0.0;
        });
      }
      unrolled<own>([&](index_t j) { square += key[j] * key[j]; });
    }
    x.length = square_root(reduce_sum(square));
    return x;
  }

  KVMELD_DEVICE double share(float weight) const {
    return total > 0 ? static_cast<double>(weight) / total : 1.0 / size;
  }
  /// Directions that cancel, to float's precision, leave the centre's own.
  KVMELD_DEVICE merge_source of_member(index_t s, bool centre, float weight,
                                       float key_length) const {
    const auto scaled =
        static_cast<float>(static_cast<double>(norm) * unit(weight, key_length) / length);
    const float key = length > 1e-6 ? (scaled - scaled == 0 ? scaled : 0.0F) : centre ? 1.0F : 0.0F;
    return {s, key, static_cast<float>(share(weight))};
  }

 private:
  KVMELD_DEVICE double unit(float weight, float key_length) const {  // of the key's own direction
    return key_length > 0 ? share(weight) / static_cast<double>(key_length) : 0.0;
  }
};

/// ... for `weigh_rows`.
struct entry_weights {
  const float *weight, *key_length;  // [heads, capacity]

  KVMELD_DEVICE bool alone(const head_context&, index_t, bool) const { return false; }
  template <class Scalar>
  KVMELD_DEVICE void operator()(const cache_view<Scalar>& cache, index_t h,
                                const head_context& head, merge_source* row, index_t size, float&,
                                const warp_team&) const {
    const float *const w = weight + head.first, *const length = key_length + head.first;
    const auto made = entry_merge::of(
        cache, h, size, head.column(entry_table::norm, row[0].source),
        [&](index_t i) { return row[i].source; }, [&](index_t s) { return w[s]; },
        [&](index_t s) { return length[s]; });
    for (index_t i = lane(); i < size; i += 32) {
      const index_t s = row[i].source;
      row[i] = made.of_member(s, i == 0, w[s], length[s]);
    }
  }
};

}  // namespace kvmeld::cuda::detail
