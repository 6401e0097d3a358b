// SPDX-License-Identifier: MIT
/// What reference queries get from a head, on tensor cores.
#pragma once

#include "kvmeld/cuda/device/half_tile.cuh"
#include "kvmeld/cuda/policies/fold/reference.cuh"

namespace kvmeld::cuda::detail {

/// Reference queries in registers: 16 of each of a block's four warps.
template <class Scalar, index_t Depth>
struct held_queries {
  static constexpr index_t warps = 4, threads = 32 * warps, queries_a_block = 16 * warps;
  matrices of[Depth / 16];

  /// Of the block's queries, those of a lane's sums: `i` 0 and 1.
  KVMELD_DEVICE static index_t query(index_t i) { return warp() * 16 + lane() / 4 + 8 * i; }

  /// Those from `q0` on of the `all` of head `h`'s query heads, through `shared`, which is idle.
  template <index_t N>
  KVMELD_DEVICE void load(shared_array<Scalar, N>& shared, const chosen_rows<Scalar>& queries,
                          index_t h, index_t q0, index_t all, index_t dim) {
    using tile = packed_rows<Depth>;
    static_assert(tile::size <= N);
    tile::copy(
        shared, 0, 0, dim,
        [&](index_t r) {
          const index_t q = q0 + r < all ? q0 + r : all - 1;
          return queries.at(h, q / queries.count, q % queries.count);
        },
        [&](index_t r) { return q0 + r < all; });
    commit_async();
    wait_async<0>();
    sync_block();
    unrolled<Depth / 16>([&](index_t k) { of[k] = tile::left(shared, 0, warp() * 16, k); });
    sync_block();
  }
  /// `x += queries · keys`, of 32 keys from `row` on of the tiles at `at`: `Parts` of each key.
  template <class Tile, index_t Parts, index_t N>
  KVMELD_DEVICE void multiply(const shared_array<Scalar, N>& keys, index_t at, index_t row,
                              index_t dim, float (&x)[4][4]) const {
    unrolled<Depth / 16>([&](index_t k) {
      if (k * 16 < dim) {
        unrolled<Parts, 2>([&](index_t part, index_t pair) {
          const matrices b = Tile::right(keys, at + part * Tile::size, row + pair * 16, k);
          add_product<Scalar>(x[pair * 2], x[pair * 2 + 1], of[k].of, b);
        });
      }
    });
  }
};

/// Two numbers as what they round to, and the rest.
template <class Scalar>
KVMELD_DEVICE void split_pair(float x, float y, unsigned& high, unsigned& rest) {
  const Scalar a = from_float<Scalar>(x), b = from_float<Scalar>(y);
  high = pair_of(a, b);
  rest = pair_of(from_float<Scalar>(x - to_float(a)), from_float<Scalar>(y - to_float(b)));
}

/// `Σ_s exp(ℓ_s − Z) v_s` for every reference query, Z given, of rows of 16-bit elements that begin
/// at multiples of 16 bytes. A warp holds 16 queries for its whole life; K and V stream by, 64
/// slots at a time. Weights go in two 16-bit parts, what they round to and the rest, which is as
/// good as float. Reads K and V once for 64 queries; K again for every 128 columns of V.
template <class Scalar, index_t Depth>
struct reference_tiles {
  using held = held_queries<Scalar, Depth>;
  static constexpr index_t threads = held::threads, queries_a_block = held::queries_a_block;
  static constexpr index_t slots = 64, some = 32, stages = 2, resident = 2, columns = 128;
  using key_tile = packed_rows<Depth>;
  using value_tile = packed_rows<columns>;
  using key_array = shared_array<Scalar, stages * key_tile::size>;
  using value_array = shared_array<Scalar, stages * value_tile::size>;
  struct shared_memory {
    key_array keys;
    value_array values;
    shared_array<float, stages * slots> mass;
  };
  static_assert(sizeof(Scalar) == 2 && queries_a_block == slots);

  cache_view<Scalar> cache;
  chosen_rows<Scalar> queries;
  const float* log_sum_exp;  // [heads, group, count]
  float* out;                // [heads, group, count, dim]

  /// Grid: heads, blocks of queries, columns of V.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (!queries.asks(h)) {
      return;
    }
    const index_t q0 = block_y() * queries_a_block;
    const index_t first = block_z() * columns;
    const index_t all = queries.count * cache.group, n = cache.length[h];
    const auto keys = cache.keys.of(h), values = cache.values.of(h);
    held query;
    query.load(shared.keys, queries, h, q0, all, cache.dim);
    float z[2];
    unrolled<2>([&](index_t i) {
      const index_t q = q0 + held::query(i);
      z[i] = q < all ? log2_e * log_sum_exp[std::ptrdiff_t{h} * all + q] : 0.0F;
    });

    const auto load = [&](index_t step, index_t stage) {
      const index_t s0 = step * slots;
      const auto is = [&](index_t r) { return s0 + r < n; };
      key_tile::copy(
          shared.keys, stage * key_tile::size, 0, cache.dim,
          [&](index_t r) { return keys.at(is(r) ? s0 + r : s0); }, is);
      value_tile::copy(
          shared.values, stage * value_tile::size, first, cache.dim,
          [&](index_t r) { return values.at(is(r) ? s0 + r : s0); }, is);
      if (thread_index() < slots) {
        const index_t s = s0 + thread_index();
        shared.mass[stage * slots + thread_index()] =
            s < n ? log2_e * cache.log_mass_of(h)[s] : lowest_score;
      }
    };
    const float scale = cache.scale * log2_e;
    float sum[columns / 8][4] = {};
    each_staged<stages>((n + slots - 1) / slots, load, [&](index_t, index_t stage) {
      KVMELD_ROLLED
      for (index_t s = 0; s < slots; s += some) {
        float x[some / 8][4] = {};
        query.template multiply<key_tile, 1>(shared.keys, stage * key_tile::size, s, cache.dim, x);
        unsigned high[some / 16][4], rest[some / 16][4];
        unrolled<some / 8, 2>([&](index_t t, index_t i) {
          float p[2];
          unrolled<2>([&](index_t e) {
            const float mass = shared.mass[stage * slots + s + t * 8 + lane() % 4 * 2 + e];
            p[e] = exp2_approx(multiply_add(scale, x[t][2 * i + e], mass - z[i]));
          });
          split_pair<Scalar>(p[0], p[1], high[t / 2][t % 2 * 2 + i], rest[t / 2][t % 2 * 2 + i]);
        });
        add_values(shared.values, stage * value_tile::size, s, first, high, rest, sum);
      }
    });
    unrolled<columns / 8, 2>([&](index_t t, index_t i) {
      const index_t q = q0 + held::query(i), c = first + t * 8 + lane() % 4 * 2;
      if (q < all && c < cache.dim) {
        store_pair(out + (std::ptrdiff_t{h} * all + q) * cache.dim + c, sum[t][2 * i],
                   sum[t][2 * i + 1]);
      }
    });
  }

 private:
  /// `sum += weights · values` of the same slots.
  KVMELD_DEVICE void add_values(const value_array& values, index_t tile, index_t s, index_t first,
                                const unsigned (&high)[some / 16][4],
                                const unsigned (&rest)[some / 16][4],
                                float (&sum)[columns / 8][4]) const {
    unrolled<columns / 16>([&](index_t c) {
      if (first + c * 16 < cache.dim) {
        unrolled<some / 16>([&](index_t k) {
          const matrices b = value_tile::right_of_columns(values, tile, c * 16, s + k * 16);
          add_product<Scalar>(sum[c * 2], sum[c * 2 + 1], high[k], b);
          add_product<Scalar>(sum[c * 2], sum[c * 2 + 1], rest[k], b);
        });
      }
    });
  }
};

}  // namespace kvmeld::cuda::detail
