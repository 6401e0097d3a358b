// SPDX-License-Identifier: MIT
/// What reference queries get from the rows that are to stand for a head, on tensor cores.
#pragma once

#include "kvmeld/cuda/policies/fold/reference_tiles.cuh"
#include "kvmeld/cuda/policies/fold/value_memory.cuh"

namespace kvmeld::cuda::detail {

/// As `row_probabilities`, of rows that lie in two parts of 16 bits. A warp holds 16 queries; keys
/// stream by for the log-sum-exp, then keys and values, 32 rows at a time. Weights and values go in
/// two parts, which is as good as float.
template <class Scalar, index_t Depth>
struct probability_tiles {
  using held = held_queries<Scalar, Depth>;
  static constexpr index_t threads = held::threads, queries_a_block = held::queries_a_block;
  static constexpr index_t rows = 32, stages = 2, resident = 2, columns = 128;
  using key_tile = packed_rows<Depth, rows>;
  using value_tile = packed_rows<columns, rows>;
  using key_array = shared_array<Scalar, stages * 2 * key_tile::size>;
  using value_array = shared_array<Scalar, stages * 2 * value_tile::size>;
  struct shared_memory {
    key_array keys;
    value_array values;
    shared_array<float, stages * rows> mass;
    shared_array<index_t, stages * rows> place;
    of_warps<float, threads> number;
  };

  cache_view<Scalar> cache;
  chosen_rows<Scalar> queries;
  plan_view plan;
  ridge_system system;
  value_scratch of;  // `missing`: the output before

  /// Parts of a head in `squares` and `largest`.
  index_t parts() const { return system.depth / queries_a_block * system.dim_tiles; }

  /// Grid: heads, blocks of queries, columns of V.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (!queries.asks(h)) {
      return;
    }
    const index_t q0 = block_y() * queries_a_block;
    const bool stores = block_index().z == 0;
    const index_t first = block_z() * columns;
    const index_t all = queries.count * cache.group, n = plan.rows[h];
    held query;
    query.load(shared.keys, queries, h, q0, all, cache.dim);

    const index_t turns = (n + rows - 1) / rows;  // of each of two passes
    const auto load = [&](index_t turn, index_t stage) {
      load_rows(shared, h, n, turn % turns * rows, stage, first, turn >= turns);
    };
    const float scale = cache.scale * log2_e;
    float max[2] = {lowest_score, lowest_score}, total[2] = {}, squares = 0;
    float sum[columns / 8][4] = {};
    each_staged<stages>(2 * turns, load, [&](index_t turn, index_t stage) {
      float x[rows / 8][4] = {};
      query.template multiply<key_tile, 2>(shared.keys, stage * 2 * key_tile::size, 0, cache.dim,
                                           x);
      each(x, [&](float& y, index_t, index_t column) {
        y = multiply_add(scale, y, shared.mass[stage * rows + column]);
      });
      if (turn < turns) {
        add_exponentials(x, max, total);
      } else {
        if (turn == turns) {
          set_log_sums(q0, all, max, total);
        }
        weigh(shared, h, q0, stage, stores, total, x, squares, sum);
      }
    });
    if (stores) {
      store_zeros(h, q0);
    }
    const float largest = subtract(h, q0, first, all, sum);
    const float all_squares = block_sum(shared.number, squares);
    const float most = block_max(shared.number, largest);
    if (thread_index() == 0) {
      const std::ptrdiff_t part =
          (std::ptrdiff_t{h} * grid().y + block_index().y) * grid().z + block_index().z;
      of.squares[part] = all_squares, of.largest[part] = most;
    }
  }

 private:
  /// `use(number, which of the lane's two queries, row of the stage)`.
  template <class Use>
  KVMELD_DEVICE static void each(float (&x)[rows / 8][4], Use use) {
    unrolled<rows / 8, 4>(
        [&](index_t t, index_t i) { use(x[t][i], i / 2, t * 8 + lane() % 4 * 2 + i % 2); });
  }

  KVMELD_DEVICE void load_rows(shared_memory& shared, index_t h, index_t n, index_t r0,
                               index_t stage, index_t first, bool values) const {
    const auto is = [&](index_t r) { return r0 + r < n; };
    unrolled<2>([&](index_t part) {
      key_tile::copy(
          shared.keys, (stage * 2 + part) * key_tile::size, 0, cache.dim,
          [&](index_t r) {
            return of.rows.template key_parts<Scalar>(h, is(r) ? r0 + r : r0) + part * cache.dim;
          },
          is);
      if (values) {
        value_tile::copy(
            shared.values, (stage * 2 + part) * value_tile::size, first, cache.dim,
            [&](index_t r) {
              return of.rows.template value_parts<Scalar>(h, is(r) ? r0 + r : r0) +
                     part * cache.dim;
            },
            is);
      }
    });
    if (thread_index() < rows) {
      const index_t r = r0 + thread_index(), at = stage * rows + thread_index();
      shared.mass[at] = r < n ? log2_e * plan.log_mass[cache.slot(h, r)] : lowest_score;
      shared.place[at] = r < n ? of.place[cache.slot(h, r)] : -1;
    }
  }

  /// Of a lane's own rows.
  KVMELD_DEVICE static void add_exponentials(float (&x)[rows / 8][4], float (&max)[2],
                                             float (&total)[2]) {
    float top[2] = {max[0], max[1]};
    each(x, [&](float y, index_t i, index_t) { top[i] = y > top[i] ? y : top[i]; });
    unrolled<2>([&](index_t i) { total[i] *= exp2_approx(max[i] - top[i]), max[i] = top[i]; });
    each(x, [&](float y, index_t i, index_t) { total[i] += exp2_approx(y - max[i]); });
  }
  /// The log-sum-exp over all four lanes' into `total`; of queries that there are not, no weight's.
  KVMELD_DEVICE static void set_log_sums(index_t q0, index_t all, const float (&max)[2],
                                         float (&total)[2]) {
    unrolled<2>([&](index_t i) {
      const float top = reduce_max(max[i], 4);
      const float sum = reduce_sum(total[i] * exp2_approx(max[i] - top), 4);
      total[i] = q0 + held::query(i) < all ? top + log2_approx(sum) : -lowest_score;
    });
  }

  /// Logits become weights: into the system, their squares, and times the values.
  KVMELD_DEVICE void weigh(shared_memory& shared, index_t h, index_t q0, index_t stage, bool stores,
                           const float (&log_sum)[2], float (&x)[rows / 8][4], float& squares,
                           float (&sum)[columns / 8][4]) const {
    each(x, [&](float& y, index_t i, index_t column) {
      y = exp2_approx(y - log_sum[i]);
      squares += stores && shared.place[stage * rows + column] >= 0 ? y * y : 0.0F;
    });
    unrolled<rows / 16>([&](index_t k) {
      if (stores) {
        store_weights(shared, h, q0, stage, k, x);
      }
      unsigned high[4], rest[4];
      unrolled<2, 2>([&](index_t t, index_t i) {
        const float* const p = x[2 * k + t] + 2 * i;
        split_pair<Scalar>(p[0], p[1], high[t * 2 + i], rest[t * 2 + i]);
      });
      const index_t at = stage * 2 * value_tile::size;
      unrolled<columns / 16>([&](index_t c) {
        const matrices b = value_tile::right_of_columns(shared.values, at, c * 16, k * 16);
        add_product<Scalar>(sum[c * 2], sum[c * 2 + 1], high, b);
        add_product<Scalar>(sum[c * 2], sum[c * 2 + 1], rest, b);
        const matrices low =
            value_tile::right_of_columns(shared.values, at + value_tile::size, c * 16, k * 16);
        add_product<Scalar>(sum[c * 2], sum[c * 2 + 1], high, low);
      });
    });
  }
  /// Of sixteen rows, those that the system knows: eight queries of a row a lane.
  KVMELD_DEVICE void store_weights(shared_memory& shared, index_t h, index_t q0, index_t stage,
                                   index_t k, const float (&x)[rows / 8][4]) const {
    unsigned words[4];
    unrolled<4>([&](index_t e) {
      const float* const y = x[2 * k + e / 2] + e % 2 * 2;
      words[e] = transposed(pair_of(from_float<half>(system.p_scale * y[0]),
                                    from_float<half>(system.p_scale * y[1])));
    });
    transpose_quad(words);
    const index_t e = lane() % 4, r = k * 16 + e / 2 * 8 + lane() / 4;
    const index_t unknown = shared.place[stage * rows + r];
    if (unknown >= 0) {
      store_16(system.row(h, unknown) + q0 + warp() * 16 + e % 2 * 8, halves_of(words));
    }
  }
  /// Rows of the system up to whole tiles.
  KVMELD_DEVICE void store_zeros(index_t h, index_t q0) const {
    constexpr index_t packs = queries_a_block / 8;
    const index_t from = of.unknowns[h], rest = system.unknown_rows(h) - from;
    for (index_t e = thread_index(); e < packs * rest; e += threads) {
      store_16(system.row(h, from + e / packs) + q0 + e % packs * 8, vector_16<half>{});
    }
  }
  /// What the outputs lack, and the largest of it.
  KVMELD_DEVICE float subtract(index_t h, index_t q0, index_t first, index_t all,
                               const float (&sum)[columns / 8][4]) const {
    float largest = 0;
    unrolled<columns / 8, 2>([&](index_t t, index_t i) {
      const index_t q = q0 + held::query(i), c = first + t * 8 + lane() % 4 * 2;
      if (q < all && c < cache.dim) {
        float* const y = of.missing + (std::ptrdiff_t{h} * all + q) * cache.dim + c;
        const float a = y[0] - sum[t][2 * i], b = y[1] - sum[t][2 * i + 1];
        store_pair(y, a, b);
        const float u = a < 0 ? -a : a, v = b < 0 ? -b : b;
        largest = u > largest ? u : largest, largest = v > largest ? v : largest;
      }
    });
    return largest;
  }
};

}  // namespace kvmeld::cuda::detail
