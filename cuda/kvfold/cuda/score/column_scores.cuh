/// Column sums of a prompt's causal attention, without ever holding the attention.
#pragma once

#include <cmath>  // std::log

#include "kvfold/cuda/memory/work_memory.cuh"
#include "kvfold/cuda/score/queries.cuh"

namespace kvfold::cuda {

/// What to sum, as in `kvfold::column_options`.
struct column_options {
  index_t window = 0;
  float decay = 1;
  group_combine combine = group_combine::sum;
  const float* log_sum_exp =
      nullptr;  ///< [heads, group, count] if attention left it; null: computed
};

/// Where the sums go, `[heads, capacity]` each; null: not wanted.
struct column_sums {
  float* total = nullptr;
  float* window = nullptr;
  float* decayed = nullptr;
};

namespace detail {

/// Σ_i over the queries of exp(ℓ_ij − lse_i), the group combined, for every slot. A block holds a
/// tile of keys and streams the queries past it, all heads of the group one after another, so a
/// column's sum is one block's and in one order.
template <class Scalar, index_t Depth, class Queries = query_rows<Scalar>>
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
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t s0 = static_cast<index_t>(block_index().y) * shape::rows;
    const index_t n = cache.length[h], tokens_total = cache.tokens_total[h];
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
    float mass[shape::row_tiles][2], sums[3][shape::row_tiles][2] = {};
    KVFOLD_UNROLL
    for (index_t m = 0; m < shape::row_tiles; ++m) {
      KVFOLD_UNROLL
      for (index_t i = 0; i < 2; ++i) {
        const index_t s = s0 + shape::row(m, 2 * i);
        own[m][i] = s < n ? cache.position[cache.slot(h, s)] : never;
        mass[m][i] = s < n ? cache.log_mass[cache.slot(h, s)] : 0.0F;
      }
    }
    for (index_t r = lane(); r < shape::rows && s0 + r < n; r += 32) {
      const index_t p = cache.position[cache.slot(h, s0 + r)];
      earliest = p < earliest ? p : earliest;
    }
    earliest = -reduce_max(-earliest);

    const auto position_of = [&](index_t i) { return queries.position_of(h, i, tokens_total); };
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
            [&](index_t c) { return i0 + c < queries.count ? queries.at(h, g, i0 + c) : nullptr; },
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
      KVFOLD_UNROLL
      for (index_t m = 0; m < shape::row_tiles; ++m) {
        KVFOLD_UNROLL
        for (index_t c = 0; c < shape::column_tiles; ++c) {
          KVFOLD_UNROLL
          for (index_t j = 0; j < 4; ++j) {
            const index_t column = shape::column(c, j);
            const float l = cache.scale * x[m][c][j] + mass[m][j / 2];
            const float lse = shared.log_sum[turn][column];
            const bool sees = own[m][j / 2] <= shared.position[turn][column] && lse != lowest_score;
            const float p = sees ? exponential(l - lse) : 0.0F;
            float& a = combined[m][c][j];
            a = g == 0 ? p : combine != group_combine::max ? a + p : p > a ? p : a;
          }
        }
      }
      if (last) {
        add(shared, turn, i0, combined, sums);
      }
      sync_block();  // the tile may be overwritten
      i0 = after, g = after_g, turn ^= 1;
    }
    wait_async<0>();
    const float share = combine == group_combine::mean ? static_cast<float>(cache.group) : 1.0F;
    float* const to[3] = {out.total, out.window, out.decayed};
    KVFOLD_UNROLL
    for (index_t k = 0; k < 3; ++k) {
      KVFOLD_UNROLL
      for (index_t m = 0; m < shape::row_tiles; ++m) {
        KVFOLD_UNROLL
        for (index_t i = 0; i < 2; ++i) {
          const float sum = reduce_sum(sums[k][m][i], 4) / share;
          const index_t s = s0 + shape::row(m, 2 * i);
          if (to[k] != nullptr && lane() % 4 == 0 && s < n) {
            to[k][cache.slot(h, s)] = sum;
          }
        }
      }
    }
  }

 private:
  KVFOLD_DEVICE void add(shared_memory& shared, index_t turn, index_t i0,
                         const typename shape::products& a,
                         float (&sums)[3][shape::row_tiles][2]) const {
    KVFOLD_UNROLL
    for (index_t c = 0; c < shape::column_tiles; ++c) {
      KVFOLD_UNROLL
      for (index_t e = 0; e < 2; ++e) {
        const index_t column = shape::column(c, e);
        const float age = shared.age[turn][column];
        const bool late = i0 + column >= queries.count - window;
        KVFOLD_UNROLL
        for (index_t m = 0; m < shape::row_tiles; ++m) {
          KVFOLD_UNROLL
          for (index_t i = 0; i < 2; ++i) {
            const float p = a[m][c][2 * i + e];
            sums[0][m][i] += p;
            sums[1][m][i] += late ? p : 0.0F;
            sums[2][m][i] += age * p;
          }
        }
      }
    }
  }
};

template <class Scalar, index_t Depth, class Queries>
void column_scores(const cache_view<Scalar>& cache, const Queries& queries,
                   const column_options& options, const column_sums& out, float* log_sum_exp,
                   stream stream) {
  using shape = tile_shape<product_scalar<Scalar, Queries>, Depth>;
  const auto heads = cache.blocks(), group = static_cast<unsigned>(cache.group);
  const auto tiles = [](index_t n) {
    return static_cast<unsigned>((n + shape::rows - 1) / shape::rows);
  };
  const bool aligned = cache.aligned() && queries.aligned();
  if (options.log_sum_exp == nullptr) {
    launch(query_log_sums<Scalar, Depth, Queries>{cache, queries, log_sum_exp, aligned},
           {heads, group, tiles(queries.count)}, stream);
  }
  launch(
      slot_sums<Scalar, Depth, Queries>{
          cache, queries, options.log_sum_exp == nullptr ? log_sum_exp : options.log_sum_exp, out,
          options.combine, options.window,
          static_cast<float>(std::log(static_cast<double>(options.decay))), aligned},
      {heads, tiles(cache.capacity)}, stream);
}

}  // namespace detail

/// `kvfold::column_scores` of all heads: `a_ij = softmax_j(scale · q_i·k_j + log_mass_j)` over the
/// slots at or before query `i`'s position, summed over `i`; the first `length` numbers of each
/// head's `[capacity]` are written. Two launches, one when the log-sum-exp is given. Memory: that
/// log-sum-exp. Q is read once per 128 slots, K once per 128 queries (64 for float).
template <class Scalar>
void column_scores(const cache_view<Scalar>& cache, const query_rows<Scalar>& queries,
                   const column_options& options, const column_sums& out, workspace memory,
                   stream stream) {
  check(cache);
  expects(queries.count > 0 && queries.data != nullptr,
          "cuda column_scores: at least 1 query expected, ",
          queries.data == nullptr ? 0 : queries.count, " came");
  expects(options.decay > 0 && options.decay <= 1,
          "cuda column_scores: a decay in (0, 1] expected, ", options.decay, " came");
  expects(options.window >= 0, "cuda column_scores: a window of at least 0 queries expected, ",
          options.window, " came");
  float* log_sum_exp = nullptr;
  if (options.log_sum_exp == nullptr) {
    workspace_allocator from(memory);
    log_sum_exp = from.take<float>(
        column_scores_workspace_bytes(cache.heads, cache.group, queries.count) / sizeof(float));
    from.check("cuda column_scores");
  }
  if (cache.dim <= 128) {
    detail::column_scores<Scalar, 128>(cache, queries, options, out, log_sum_exp, stream);
  } else {
    detail::column_scores<Scalar, 256>(cache, queries, options, out, log_sum_exp, stream);
  }
}

}  // namespace kvfold::cuda
