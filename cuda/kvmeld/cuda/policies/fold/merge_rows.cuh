// SPDX-License-Identifier: MIT
/// The rows of a plan as what stands for the head, and their log-mass.
#pragma once

#include "kvmeld/cuda/device/half_tile.cuh"
#include "kvmeld/cuda/policies/fold/pairs.cuh"
#include "kvmeld/cuda/policies/fold/reference.cuh"
#include "kvmeld/cuda/policies/fold/value_memory.cuh"

namespace kvmeld::cuda::detail {

/// The rows of a plan, keys and values, as floats or in `Parts` of 16 bits. A warp a row, which may
/// have thousands of sources: four of them are asked for at once, and added one after the other.
template <class Scalar, bool Parts>
struct merge_rows {
  static constexpr index_t threads = 256;
  static constexpr index_t own = 4, some = 4;  // numbers of a lane, sources in flight
  struct shared_memory {};

  cache_view<Scalar> cache;
  plan_view plan;
  plan_rows to;

  /// Grid: heads, any number of blocks that share the rows.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    const index_t* const begin = plan.begin + cache.bound(h, 0);
    each_by_warp<threads>(plan.rows[h], [&](index_t r) {
      for (index_t first = 0; first < cache.dim; first += 32 * own) {
        merge(h, r, begin[r], begin[r + 1], first);
      }
    });
  }

 private:
  /// The lane's numbers of row `r`, from column `first` on.
  KVMELD_DEVICE void merge(index_t h, index_t r, index_t begin, index_t end, index_t first) const {
    const auto keys = cache.keys.of(h), values = cache.values.of(h);
    float k[own] = {}, v[own] = {};
    for (index_t base = begin; base < end; base += 32) {
      const bool is = base + lane() < end;
      const merge_source mine = plan.sources[cache.slot(h, is ? base + lane() : begin)];
      const index_t count = end - base < 32 ? end - base : 32;
      KVMELD_ROLLED
      for (index_t e0 = 0; e0 < count; e0 += some) {
        Scalar key[some][own], value[some][own];
        unrolled<some>([&](index_t e) {
          const index_t s = shuffle(mine.source, e0 + e);
          unrolled<own>([&](index_t w) {
            const index_t i = first + 32 * w + lane();
            const bool there = i < cache.dim && e0 + e < count;
            key[e][w] = there ? keys.at(s)[i] : Scalar{};
            value[e][w] = there ? values.at(s)[i] : Scalar{};
          });
        });
        unrolled<some>([&](index_t e) {
          const float a = shuffle(mine.key_weight, e0 + e), b = shuffle(mine.value_weight, e0 + e);
          KVMELD_UNROLL
          for (index_t w = 0; w < own && e0 + e < count; ++w) {
            k[w] += a * to_float(key[e][w]), v[w] += b * to_float(value[e][w]);
          }
        });
      }
    }
    unrolled<own>([&](index_t w) {
      if (const index_t i = first + 32 * w + lane(); i < cache.dim) {
        if constexpr (Parts) {
          put(to.template key_parts<Scalar>(h, r) + i, k[w]);
          put(to.template value_parts<Scalar>(h, r) + i, v[w]);
        } else {
          to.key[to.at(h, r) + i] = k[w], to.value[to.at(h, r) + i] = v[w];
        }
      }
    });
  }
  KVMELD_DEVICE void put(Scalar* to_part, float x) const {
    const Scalar high = from_float<Scalar>(x);
    to_part[0] = high, to_part[cache.dim] = from_float<Scalar>(x - to_float(high));
  }
};

/// Members of the rows that may change, weighted; `plan.log_mass` becomes their sum. A warp a row.
template <class Scalar>
struct weigh_members {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  cache_view<Scalar> cache;
  plan_view plan;
  member_weights<Scalar> weights;
  value_scratch of;

  /// Grid: heads, any number of blocks that share the rows.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    const index_t* const begin = plan.begin + cache.bound(h, 0);
    each_by_warp<threads>(of.unknowns[h], [&](index_t u) {
      const index_t r = of.row[cache.slot(h, u)];
      const float members =
          weights(h, plan.sources + cache.slot(h, begin[r]), begin[r + 1] - begin[r]);
      if (lane() == 0) {
        plan.log_mass[cache.slot(h, r)] = members;
      }
    });
  }
};

/// `β = ln(members / Σ_q exp(scale · q·k − Z_q))` of those rows, whose keys lie in two parts. A
/// warp has 16 rows, and the queries stream by, 64 at a time, of more than 128 elements 32.
template <class Scalar, index_t Depth>
struct row_masses {
  using tile = packed_rows<Depth>;
  static constexpr index_t threads = tile::threads, rows = 64, some = 32, stages = 2;
  using query_tile = packed_rows<Depth, Depth <= 128 ? 64 : 32>;
  using query_array = shared_array<Scalar, stages * query_tile::size>;
  struct shared_memory {
    shared_array<Scalar, 2 * tile::size> keys;
    query_array queries;
    shared_array<float, stages * query_tile::rows> log_sum;
  };

  cache_view<Scalar> cache;
  plan_view plan;
  chosen_rows<Scalar> queries;
  const float* log_sum_exp;  // [heads, group, count]
  value_scratch of;

  /// Grid: heads, blocks of rows.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), n = of.unknowns[h];
    const index_t u0 = block_y() * rows;
    if (u0 >= n) {
      return;
    }
    const index_t all = queries.count * cache.group;
    const index_t* const row = of.row + cache.slot(h, 0);
    unrolled<2>([&](index_t part) {
      tile::copy(
          shared.keys, part * tile::size, 0, cache.dim,
          [&](index_t r) {
            return of.rows.template key_parts<Scalar>(h, row[u0 + r < n ? u0 + r : u0]) +
                   part * cache.dim;
          },
          [&](index_t r) { return u0 + r < n; });
    });
    const auto load = [&](index_t step, index_t stage) {
      const index_t q0 = step * query_tile::rows;
      const auto is = [&](index_t r) { return q0 + r < all; };
      query_tile::copy(
          shared.queries, stage * query_tile::size, 0, cache.dim,
          [&](index_t r) {
            const index_t q = is(r) ? q0 + r : q0;
            return queries.at(h, q / queries.count, q % queries.count);
          },
          is);
      if (thread_index() < query_tile::rows) {
        const index_t q = q0 + thread_index();
        shared.log_sum[stage * query_tile::rows + thread_index()] =
            q < all ? log2_e * log_sum_exp[std::ptrdiff_t{h} * all + q] : -lowest_score;
      }
    };
    const float scale = cache.scale * log2_e;
    float alone[2] = {};
    const index_t steps = (all + query_tile::rows - 1) / query_tile::rows;
    each_staged<stages>(steps, load, [&](index_t, index_t stage) {
      KVMELD_ROLLED
      for (index_t q = 0; q < query_tile::rows; q += some) {
        float x[some / 8][4] = {};
        multiply(shared, stage, q, x);
        unrolled<some / 8, 4>([&](index_t t, index_t i) {
          const index_t column = q + t * 8 + lane() % 4 * 2 + i % 2;
          const float z = shared.log_sum[stage * query_tile::rows + column];
          alone[i / 2] += exp2_approx(multiply_add(scale, x[t][i], -z));
        });
      }
    });
    unrolled<2>([&](index_t i) {
      const index_t u = u0 + warp() * 16 + lane() / 4 + 8 * i;
      const float sum = reduce_sum(alone[i], 4);
      if (lane() % 4 == 0 && u < n) {
        float& mass = plan.log_mass[cache.slot(h, row[u])];
        mass = log_ratio(mass, sum);
      }
    });
  }

 private:
  /// `x = keys · queries` of queries `q ... q + some` of a stage.
  KVMELD_DEVICE void multiply(const shared_memory& shared, index_t stage, index_t q,
                              float (&x)[some / 8][4]) const {
    unrolled<Depth / 16>([&](index_t k) {
      if (k * 16 < cache.dim) {
        const matrices high = tile::left(shared.keys, 0, warp() * 16, k);
        const matrices rest = tile::left(shared.keys, tile::size, warp() * 16, k);
        unrolled<some / 16>([&](index_t pair) {
          const matrices b =
              query_tile::right(shared.queries, stage * query_tile::size, q + pair * 16, k);
          add_product<Scalar>(x[pair * 2], x[pair * 2 + 1], high.of, b);
          add_product<Scalar>(x[pair * 2], x[pair * 2 + 1], rest.of, b);
        });
      }
    });
  }
};

}  // namespace kvmeld::cuda::detail
