// SPDX-License-Identifier: MIT
/// Column sums of causal attention for every scalar, dim and combination.
#pragma once

#include "kvmeld/cuda/score/queries.cuh"

namespace kvmeld::cuda {

/// Where the numbers go, `[heads, capacity]` each; null: not wanted.
struct column_sums {
  float* total = nullptr;
  float* window = nullptr;
  float* decayed = nullptr;
  float* largest = nullptr;  ///< the largest probability, of all queries and query heads
};

namespace detail {

/// Σ_i over the queries of exp(ℓ_ij − lse_i), the group combined, for every slot; and the largest
/// of them, whatever the query head. A block holds a tile of keys and streams the queries past it,
/// all heads of the group one after another, so a column's sum is one block's and in one order.
template <class Scalar, index_t Depth, class Queries = query_rows<row_number<Scalar>>>
struct slot_sums {
  using shape = tile_shape<product_scalar<Scalar, Queries>, Depth>;
  static constexpr index_t threads = shape::threads;
  struct shared_memory {
    typename shape::row_array keys;
    typename shape::column_array queries[2];
    shared_array<float, shape::columns> log_sum[2], age[2];
    shared_array<index_t, shape::columns> position[2];
  };

  cache_view<Scalar> cache;
  Queries queries;
  const float* log_sum_exp;  // [heads, group, count]
  column_sums out;
  group_combine combine;
  index_t window;
  float log_decay;
  bool aligned;

  /// Grid: heads, tiles of slots.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t s0 = block_y() * shape::rows;
    const index_t n = cache.length[h], next_position = cache.next_position[h];
    if (s0 >= n || !queries.asks(h)) {
      return;
    }
    const auto keys = cache.keys.of(h);
    shape::template load<shape::rows>(
        shared.keys, [&](index_t r) { return s0 + r < n ? keys.at(s0 + r) : nullptr; },
        cache.keys.data, cache.dim, aligned);
    commit_async();
    constexpr index_t never = 0x7fffffff;
    index_t own[shape::row_tiles][2], earliest = never;  // positions of this lane's slots
    float mass[shape::row_tiles][2], sums[4][shape::row_tiles][2] = {};
    unrolled<shape::row_tiles, 2>([&](index_t m, index_t i) {
      const index_t s = s0 + shape::row(m, 2 * i);
      own[m][i] = s < n ? cache.position_of(h)[s] : never;
      mass[m][i] = s < n ? cache.log_mass_of(h)[s] : 0.0F;
    });
    for (index_t r = lane(); r < shape::rows && s0 + r < n; r += 32) {
      const index_t p = cache.position_of(h)[s0 + r];
      earliest = p < earliest ? p : earliest;
    }
    earliest = -reduce_max(-earliest);

    const auto position_of = [&](index_t i) { return queries.position_of(h, i, next_position); };
    const auto next = [&](index_t i0) {  // the next tile with a query that sees a slot
      for (; i0 < queries.count; i0 += shape::columns) {
        bool sees = false;
        for (index_t c = lane(); c < shape::columns && i0 + c < queries.count; c += 32) {
          sees = sees || position_of(i0 + c) >= earliest;
        }
        if (ballot(sees) != 0) {
          break;
        }
      }
      return i0;
    };
    const auto load = [&](index_t i0, index_t g, index_t turn) {
      if (i0 < queries.count) {
        shape::template load<shape::columns>(
            shared.queries[turn],
            [&](index_t c) { return queries.has(i0 + c) ? queries.at(h, g, i0 + c) : nullptr; },
            queries.data, cache.dim, aligned);
        for (index_t c = thread_index(); c < shape::columns; c += threads) {
          const index_t i = i0 + c;
          const bool is = i < queries.count;
          shared.position[turn][c] = is ? position_of(i) : -1;
          shared.age[turn][c] =
              is ? exponential(static_cast<float>(queries.count - 1 - i) * log_decay) : 0.0F;
          shared.log_sum[turn][c] =
              is ? log_sum_exp[(std::ptrdiff_t{h} * cache.group + g) * queries.count + i] : 0.0F;
        }
      }
      commit_async();
    };
    index_t i0 = next(0), g = 0, turn = 0;
    load(i0, 0, 0);
    typename shape::products combined;
    while (i0 < queries.count) {
      const bool last = g == cache.group - 1;
      const index_t after = last ? next(i0 + shape::columns) : i0, after_g = last ? 0 : g + 1;
      load(after, after_g, turn ^ 1);
      wait_async<1>();
      sync_block();
      typename shape::products x;
      shape::multiply(shared.keys, shared.queries[turn], cache.dim, x);
      cap_products(cache, x);
      unrolled<shape::row_tiles, shape::column_tiles, 4>([&](index_t m, index_t c, index_t j) {
        const index_t column = shape::column(c, j);
        const float l = cache.scale * x[m][c][j] + mass[m][j / 2];
        const float lse = shared.log_sum[turn][column];
        const bool sees = own[m][j / 2] <= shared.position[turn][column] && lse != lowest_score;
        const float p = sees ? exponential(l - lse) : 0.0F;
        float& most = sums[3][m][j / 2];
        most = p > most ? p : most;
        float& a = combined[m][c][j];
        a = g == 0 ? p : combine != group_combine::max ? a + p : p > a ? p : a;
      });
      if (last) {
        add(shared, turn, i0, combined, sums);
      }
      sync_block();  // the tile may be overwritten
      i0 = after, g = after_g, turn ^= 1;
    }
    wait_async<0>();
    const float share = combine == group_combine::mean ? static_cast<float>(cache.group) : 1.0F;
    float* const to[4] = {out.total, out.window, out.decayed, out.largest};
    unrolled<4, shape::row_tiles, 2>([&](index_t k, index_t m, index_t i) {
      const float sum =
          k == 3 ? reduce_max(sums[k][m][i], 4) : reduce_sum(sums[k][m][i], 4) / share;
      const index_t s = s0 + shape::row(m, 2 * i);
      if (to[k] != nullptr && lane() % 4 == 0 && s < n) {
        to[k][cache.slot(h, s)] = sum;
      }
    });
  }

 private:
  KVMELD_DEVICE void add(shared_memory& shared, index_t turn, index_t i0,
                         const typename shape::products& a,
                         float (&sums)[4][shape::row_tiles][2]) const {
    unrolled<shape::column_tiles, 2>([&](index_t c, index_t e) {
      const index_t column = shape::column(c, e);
      const float age = shared.age[turn][column];
      const bool late = i0 + column >= queries.count - window;
      unrolled<shape::row_tiles, 2>([&](index_t m, index_t i) {
        const float p = a[m][c][2 * i + e];
        sums[0][m][i] += p;
        sums[1][m][i] += late ? p : 0.0F;
        sums[2][m][i] += age * p;
      });
    });
  }
};

}  // namespace detail

}  // namespace kvmeld::cuda
