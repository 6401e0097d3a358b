// SPDX-License-Identifier: MIT
/// What reference queries get from a head, and from the rows that are to stand for it.
#pragma once

#include "kvmeld/cuda/policies/fold/reference.cuh"
#include "kvmeld/cuda/policies/fold/value_memory.cuh"

namespace kvmeld::cuda::detail {

/// Sixteen queries against 32 rows: a warp has two queries, a lane a row, then columns of output.
struct query_tile {
  static constexpr index_t threads = 256, queries = 16, some = 32;
  static constexpr index_t own = queries / (threads / 32);  // queries of a warp
  static constexpr index_t parts = max_dim / 32;            // elements of a row in a lane
  static constexpr index_t pitch = max_dim + 1;             // lanes meet different banks
  static constexpr index_t weights = some + 2;              // 8 queries further on are 16 banks
  struct memory {
    shared_array<float, queries * max_dim> query;
    shared_array<float, some * pitch> row;
    shared_array<float, queries * weights> weight;
  };
  using sums = float[own][parts];

  KVMELD_DEVICE static index_t query(index_t u) { return warp() * own + u; }

  /// Queries `q0 ...` of the `all` of head `h`'s query heads, zeros behind the last; a barrier
  /// before they are used is the caller's.
  template <class Scalar>
  KVMELD_DEVICE static void load_queries(memory& shared, const chosen_rows<Scalar>& of, index_t h,
                                         index_t q0, index_t all, index_t dim) {
    for (index_t e = thread_index(); e < queries * dim; e += threads) {
      const index_t q = q0 + e / dim, i = e % dim;
      shared.query[e / dim * max_dim + i] =
          q < all ? to_float(of.at(h, q / of.count, q % of.count)[i]) : 0.0F;
    }
  }
  /// Rows `row_of(r)`, zeros where there are none. Two barriers.
  template <class RowOf>
  KVMELD_DEVICE static void load_rows(memory& shared, index_t dim, RowOf row_of) {
    sync_block();  // the last are used up
    for (index_t e = thread_index(); e < some * dim; e += threads) {
      const auto* const from = row_of(e / dim);
      shared.row[e / dim * pitch + e % dim] = from == nullptr ? 0.0F : to_float(from[e % dim]);
    }
    sync_block();
  }
  /// Of this lane's row with the warp's query `u`.
  KVMELD_DEVICE static float product(memory& shared, index_t dim, index_t u) {
    float dot = 0;
    for (index_t i = 0; i < dim; ++i) {
      dot += shared.query[query(u) * max_dim + i] * shared.row[lane() * pitch + i];
    }
    return dot;
  }
  /// `sum += weight · rows`.
  KVMELD_DEVICE static void add_rows(memory& shared, index_t dim, sums& sum) {
    unrolled<own, parts>([&](index_t u, index_t w) {
      const index_t i = w * 32 + lane();
      for (index_t r = 0; r < some && i < dim; ++r) {
        sum[u][w] += shared.weight[query(u) * weights + r] * shared.row[r * pitch + i];
      }
    });
    sync_warp();  // the weights are used up
  }
  /// `use(q, i, x)` for the lane's part of the sums: element `i` of what query `q` of `all` gets.
  template <class Use>
  KVMELD_DEVICE static void each_sum(const sums& sum, index_t q0, index_t all, index_t dim,
                                     Use use) {
    unrolled<own, parts>([&](index_t u, index_t w) {
      const index_t q = q0 + query(u), i = w * 32 + lane();
      if (q < all && i < dim) {
        use(q, i, sum[u][w]);
      }
    });
  }
};

/// `Σ_s exp(ℓ_s − Z) v_s` for every reference query. Reads K and V once for sixteen queries.
template <class Scalar>
struct reference_output {
  using tile = query_tile;
  static constexpr index_t threads = tile::threads;
  using shared_memory = tile::memory;

  cache_view<Scalar> cache;
  chosen_rows<Scalar> queries;
  const float* log_sum_exp;  // [heads, group, count]
  float* out;                // [heads, group, count, dim]

  /// Grid: heads, tiles of queries.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (!queries.asks(h)) {
      return;
    }
    const index_t q0 = block_y() * tile::queries;
    const index_t all = queries.count * cache.group, n = cache.length[h];
    const auto keys = cache.keys.of(h), values = cache.values.of(h);
    tile::load_queries(shared, queries, h, q0, all, cache.dim);
    float z[tile::own];
    unrolled<tile::own>([&](index_t u) {
      const index_t q = q0 + tile::query(u);
      z[u] = q < all ? log_sum_exp[std::ptrdiff_t{h} * all + q] : 0.0F;
    });
    tile::sums sum = {};
    for (index_t s0 = 0; s0 < n; s0 += tile::some) {
      const index_t s = s0 + lane();
      tile::load_rows(shared, cache.dim,
                      [&](index_t r) { return s0 + r < n ? keys.at(s0 + r) : nullptr; });
      unrolled<tile::own>([&](index_t u) {
        const float dot = tile::product(shared, cache.dim, u);
        shared.weight[tile::query(u) * tile::weights + lane()] =
            s < n ? exponential(cache.scale * dot + cache.log_mass_of(h)[s] - z[u]) : 0.0F;
      });
      tile::load_rows(shared, cache.dim,
                      [&](index_t r) { return s0 + r < n ? values.at(s0 + r) : nullptr; });
      tile::add_rows(shared, cache.dim, sum);
    }
    tile::each_sum(sum, q0, all, cache.dim, [&](index_t q, index_t i, float x) {
      out[(std::ptrdiff_t{h} * all + q) * cache.dim + i] = x;
    });
  }
};

/// `P = softmax(scale · q·k_r + β_r)` over the rows, as rows of the ridge's system those that it
/// knows, and what `P V` lacks of the output. Of a block's queries also P's squares in the system,
/// and the largest number that is lacking.
template <class Scalar, index_t Halves>
struct row_probabilities {
  using tile = query_tile;
  static constexpr index_t threads = tile::threads;
  struct shared_memory {
    tile::memory rows;
    of_warps<float, threads> number;
  };

  cache_view<Scalar> cache;
  chosen_rows<Scalar> queries;
  plan_view plan;
  plan_rows rows;
  ridge_system system;
  value_scratch to;  // `missing`: the output before

  /// Grid: heads, tiles of queries, those that there are not included: they are zeros.
  KVMELD_DEVICE void operator()(shared_memory& memory) const {
    const index_t h = cache.head();
    if (!queries.asks(h)) {
      return;
    }
    tile::memory& shared = memory.rows;
    const index_t q0 = block_y() * tile::queries;
    const index_t all = queries.count * cache.group, n = plan.rows[h];
    const auto at = [&](index_t u, index_t r) -> float& {
      return to.probabilities[(std::ptrdiff_t{h} * all + q0 + tile::query(u)) * rows.most + r];
    };
    tile::load_queries(shared, queries, h, q0, all, cache.dim);
    float max[tile::own], total[tile::own];
    unrolled<tile::own>([&](index_t u) { max[u] = lowest_score, total[u] = 0; });
    for (index_t r0 = 0; r0 < n; r0 += tile::some) {
      const index_t r = r0 + lane();
      tile::load_rows(shared, cache.dim, [&](index_t x) {
        return r0 + x < n ? rows.key + rows.at(h, r0 + x) : nullptr;
      });
      unrolled<tile::own>([&](index_t u) {
        const float dot = tile::product(shared, cache.dim, u);
        if (r < n && q0 + tile::query(u) < all) {
          const float l = cache.scale * dot + plan.log_mass[cache.slot(h, r)];
          at(u, r) = l;
          max[u] = l > max[u] ? l : max[u];
        }
      });
    }
    unrolled<tile::own>([&](index_t u) {
      max[u] = reduce_max(max[u]);
      for (index_t r = lane(); r < n && q0 + tile::query(u) < all; r += 32) {
        const float e = exponential(at(u, r) - max[u]);
        at(u, r) = e, total[u] += e;
      }
      total[u] = reduce_sum(total[u]);
    });
    tile::sums sum = {};
    float squares = 0, largest = 0;
    for (index_t r0 = 0; r0 < n; r0 += tile::some) {
      const index_t r = r0 + lane();
      const bool known = r < n && to.place[cache.slot(h, r)] >= 0;
      unrolled<tile::own>([&](index_t u) {
        const bool is = r < n && q0 + tile::query(u) < all;
        const float x = is ? at(u, r) / total[u] : 0.0F;
        squares += known ? x * x : 0.0F;
        shared.weight[tile::query(u) * tile::weights + lane()] = x;
      });
      sync_block();
      store_rows(shared, h, q0, r0, n);
      tile::load_rows(shared, cache.dim, [&](index_t x) {
        return r0 + x < n ? rows.value + rows.at(h, r0 + x) : nullptr;
      });
      tile::add_rows(shared, cache.dim, sum);
    }
    store_zeros(h, q0);
    tile::each_sum(sum, q0, all, cache.dim, [&](index_t q, index_t i, float x) {
      float& y = to.missing[(std::ptrdiff_t{h} * all + q) * cache.dim + i];
      y -= x;
      const float size = y < 0 ? -y : y;
      largest = size > largest ? size : largest;
    });
    squares = block_sum(memory.number, squares), largest = block_max(memory.number, largest);
    if (thread_index() == 0) {
      const std::ptrdiff_t part = std::ptrdiff_t{h} * grid().y + block_index().y;
      to.squares[part] = squares, to.largest[part] = largest;
    }
  }

 private:
  /// The weights of those that the system knows: eight queries of a row a thread.
  KVMELD_DEVICE void store_rows(tile::memory& shared, index_t h, index_t q0, index_t r0,
                                index_t n) const {
    const index_t r = r0 + thread_index() / 2, pack = thread_index() % 2;
    if (thread_index() < 2 * tile::some && r < n && to.place[cache.slot(h, r)] >= 0) {
      float x[8];
      unrolled<8>([&](index_t u) {
        x[u] = system.p_scale * shared.weight[(pack * 8 + u) * tile::weights + r - r0];
      });
      store(x, h, to.place[cache.slot(h, r)], q0 + pack * 8);
    }
  }
  /// Rows of the system up to whole tiles.
  KVMELD_DEVICE void store_zeros(index_t h, index_t q0) const {
    const index_t from = to.unknowns[h], rest = system.unknown_rows(h) - from;
    for (index_t e = thread_index(); e < 2 * rest; e += threads) {
      store({}, h, from + e / 2, q0 + e % 2 * 8);
    }
  }
  KVMELD_DEVICE void store(const float (&x)[8], index_t h, index_t unknown, index_t query) const {
    store_halves<Halves>(x, system.row(h, unknown) + query, system.low());
  }
};

}  // namespace kvmeld::cuda::detail
