// SPDX-License-Identifier: MIT
/// EMS: the centre most like every entry that is to be merged, and what they are merged into.
#pragma once

#include <type_traits>  // std::is_same_v

#include "kvmeld/cuda/memory/tile.cuh"
#include "kvmeld/cuda/merge/weigh_rows.cuh"
#include "kvmeld/cuda/policies/ems/rule.cuh"
#include "kvmeld/cuda/score/compared_in_tiles.cuh"

namespace kvmeld::cuda::detail {

/// 0 when either is zero.
KVMELD_HD inline float entry_cosine(float dot, float a, float b) {
  return a * b > 0 ? dot / (a * b) : 0.0F;
}

/// Eq. 5 in floats: of float rows, and of keys as they were before RoPE. A block holds products of
/// a tile of removed entries with one of centres in registers, first those of keys, then those of
/// values, 128 elements of the rows at a time, and keeps the best of each; ties go to the earlier
/// token, wherever it lies. Reads K and V of removed entries once per tile of centres, and of
/// centres once per tile of removed entries.
template <class Scalar>
struct most_redundant {
  static constexpr index_t depth = 128;
  using shape = tile_shape<float, depth>;
  static constexpr index_t threads = shape::threads, resident = 2;
  struct shared_memory {
    typename shape::row_array removed;
    typename shape::column_array kept;
    shared_array<index_t, shape::columns> slot, position;  // −1: none
    shared_array<float, shape::columns> key_length, value_length;
  };

  cache_view<Scalar> cache;
  entry_scratch entries;
  keep_evict_partition from;
  bool aligned;

  /// Grid: heads, tiles of removed slots.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t e0 = block_y() * shape::rows;
    const index_t count = from.removed_count[h], centres = from.kept_count[h];
    if (e0 >= count) {
      return;
    }
    const index_t* const away = from.removed + cache.slot(h, 0);
    const index_t* const stay = from.kept + cache.slot(h, 0);
    const auto length = [&](const float* of, index_t s) {
      return s < 0 ? 0.0F : of[cache.slot(h, s)];
    };
    float key_length[shape::row_tiles][2], value_length[shape::row_tiles][2];
    candidate best[shape::row_tiles][2];
    index_t into[shape::row_tiles][2];
    unrolled<shape::row_tiles, 2>([&](index_t m, index_t i) {
      const index_t e = e0 + shape::row(m, 2 * i), s = e < count ? away[e] : -1;
      key_length[m][i] = length(entries.key_length, s);
      value_length[m][i] = length(entries.value_length, s);
      best[m][i] = 0, into[m][i] = -1;
    });
    for (index_t c0 = 0; c0 < centres; c0 += shape::columns) {
      const auto row_of = [&](index_t r) { return e0 + r < count ? away[e0 + r] : -1; };
      const auto column_of = [&](index_t c) { return c0 + c < centres ? stay[c0 + c] : -1; };
      sync_block();  // the last centres are used up
      for (index_t c = thread_index(); c < shape::columns; c += threads) {
        const index_t s = column_of(c);
        shared.slot[c] = s, shared.position[c] = s < 0 ? -1 : cache.position_of(h)[s];
        shared.key_length[c] = length(entries.key_length, s);
        shared.value_length[c] = length(entries.value_length, s);
      }
      typename shape::products keys, values;
      multiply(shared, keys_of(h), row_of, column_of, keys);
      multiply(shared, cache.values.of(h), row_of, column_of, values);
      unrolled<shape::column_tiles, 4>([&](index_t c, index_t j) {
        const index_t column = shape::column(c, j), s = shared.slot[column];
        const float key = shared.key_length[column], value = shared.value_length[column];
        const index_t position = shared.position[column];
        unrolled<shape::row_tiles>([&](index_t m) {
          const float r = redundancy(entry_cosine(keys[m][c][j], key_length[m][j / 2], key),
                                     entry_cosine(values[m][c][j], value_length[m][j / 2], value));
          const candidate it = s < 0 ? candidate{0} : most_candidate(ordered(r), position);
          into[m][j / 2] = it > best[m][j / 2] ? s : into[m][j / 2];
          best[m][j / 2] = it > best[m][j / 2] ? it : best[m][j / 2];
        });
      });
    }
    unrolled<shape::row_tiles, 2>([&](index_t m, index_t i) {
      const candidate most = reduce_max(best[m][i], 4);
      const index_t its = reduce_max(best[m][i] == most ? into[m][i] : -1, 4);
      const index_t e = e0 + shape::row(m, 2 * i);
      if (lane() % 4 == 0 && e < count) {
        from.nearest.into[cache.slot(h, e)] = its;
        from.nearest.similarity[cache.slot(h, e)] =
            most == 0 ? 0.0F : number_of(static_cast<unsigned>(most >> 32));
      }
    });
  }

 private:
  /// As they are, or as they were before RoPE: these are floats.
  KVMELD_DEVICE head_rows<float> keys_of(index_t h) const {
    if constexpr (std::is_same_v<Scalar, float>) {
      if (entries.turned == nullptr) {
        return cache.keys.of(h);
      }
    }
    return {entries.turned + cache.slot(h, 0) * entries.pitch, entries.pitch, 0, nullptr, 0};
  }
  /// Products of all rows of the tile with all centres, 128 elements after the other.
  template <class Row, class RowOf, class ColumnOf>
  KVMELD_DEVICE void multiply(shared_memory& shared, const head_rows<Row>& rows, RowOf row_of,
                              ColumnOf column_of, typename shape::products& x) const {
    shape::clear(x);
    for (index_t i = 0; i < cache.dim; i += depth) {
      const index_t some = cache.dim - i < depth ? cache.dim - i : depth;
      const auto part = [&](index_t s) { return s < 0 ? nullptr : rows.at(s) + i; };
      sync_block();  // the last part is used up
      shape::template load<shape::rows>(
          shared.removed, [&](index_t r) { return part(row_of(r)); }, rows.data, some, aligned);
      shape::template load<shape::columns>(
          shared.kept, [&](index_t c) { return part(column_of(c)); }, rows.data, some, aligned);
      commit_async();
      wait_async<0>();
      sync_block();
      shape::accumulate(shared.removed, shared.kept, some, x);
    }
  }
};

/// A row of a plan: with S the members' weights (all equal if they sum to 0), the key
/// Σ S_i k_i/‖k_i‖ made as long as `norm`, the centre's own; the value Σ S_i v_i / Σ S_i.
struct entry_merge {
  double total, length;  ///< of the sum of keys
  float norm;
  index_t size;

  /// By a warp, that all take part in: `member(i)`, `weight(s)` and `key_length(s)`. A lane sums
  /// `Own` elements of the keys at once.
  template <index_t Own = max_dim / 32, class Scalar, class Member, class Weight, class Length>
  KVMELD_DEVICE static entry_merge of(const cache_view<Scalar>& cache, index_t h, index_t size,
                                      float norm, Member member, Weight weight, Length key_length) {
    double sum = 0;
    for (index_t i = lane(); i < size; i += 32) {
      sum += static_cast<double>(weight(member(i)));
    }
    entry_merge x{reduce_sum(sum), 0, norm, size};
    const auto keys = cache.keys.of(h);
    double square = 0;
    KVMELD_ROLLED
    for (index_t first = 0; first < cache.dim; first += 32 * Own) {
      double key[Own] = {};
      for (index_t i = 0; i < size; ++i) {
        const index_t s = member(i);
        const double unit = x.unit(weight(s), key_length(s));
        const Scalar* const row = keys.at(s);
        unrolled<Own>([&](index_t j) {
          const index_t e = first + j * 32 + lane();
          key[j] += e < cache.dim ? unit * static_cast<double>(to_float(row[e])) : 0.0;
        });
      }
      unrolled<Own>([&](index_t j) { square += key[j] * key[j]; });
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
