// SPDX-License-Identifier: MIT
/// Queries of a prompt, and the log-sum-exp of their causal attention.
#pragma once

#include <cstddef>      // std::ptrdiff_t
#include <cstdint>      // std::uintptr_t
#include <type_traits>  // std::conditional_t

#include "kvmeld/cuda/memory/tile.cuh"
#include "kvmeld/cuda/score/logit_terms.cuh"

namespace kvmeld::cuda {

/// Queries of all heads that a call runs, as `kvmeld::query_view` has them: query `i` of member `g`
/// of KV head `h`'s group starts at `data[place · head + g · group + i · row]`, contiguous `[dim]`,
/// where `place` is the head's in `cache_view::active` (all heads: `h`).
template <class Scalar>
struct query_rows {
  using scalar = Scalar;

  const Scalar* data = nullptr;
  index_t count = 0;  ///< queries a query head
  std::ptrdiff_t head = 0, group = 0, row = 0;
  const index_t* position = nullptr;  ///< [count]; null: the last `count` positions seen
  /// Of a prompt in chunks: queries of the same prompt that lie right before these, which windows
  /// reach back to. They do not count again.
  index_t before = 0;
  std::ptrdiff_t position_head = 0;  ///< of `position`, head to head by place; 0: one list for all
  /// `[heads, group, count]` by place, natural logarithm, from the prefill's own attention; null:
  /// not known. Not of those before.
  const float* log_sum_exp = nullptr;
  std::ptrdiff_t log_sum_row = 0;  ///< of it, query head to query head; 0: `count`

  /// Prompts of several lengths, one after another: `[sequences + 1]` on the device. Queries of the
  /// places `j · heads` to `(j + 1) · heads − 1` are rows `indptr[j]` to `indptr[j + 1] − 1`, at
  /// least 1 and at most `count`; of `log_sum_exp [heads · group]` rows too, `log_sum_row` apart.
  /// Kernels read it when they run. Null: each head has `count`.
  const index_t* indptr = nullptr;
  index_t heads = 1;   ///< places of a sequence, `head` apart
  index_t absent = 0;  ///< the first of `count`, which this block's head lacks: of `of_block` alone

  /// Queries of this block's head, the last ones of `count`: all prompts end together.
  KVMELD_DEVICE index_t own() const {
    if (indptr == nullptr) {
      return count - absent;
    }
    const index_t i = place_of_block() / heads, n = indptr[i + 1] - indptr[i];
    return n < count ? n : count;
  }
  KVMELD_DEVICE bool has(index_t i) const { return i < count && i >= count - own(); }
  /// This block's place among those of a sequence.
  KVMELD_DEVICE index_t place() const {
    return indptr == nullptr ? place_of_block() : place_of_block() % heads;
  }
  /// Query `i` of `count`'s row among all.
  KVMELD_DEVICE index_t row_of(index_t i) const {
    return indptr == nullptr ? i : indptr[place_of_block() / heads + 1] - count + i;
  }
  /// The same queries for this block, found once: a loop over them divides nothing.
  KVMELD_DEVICE query_rows of_block() const {
    query_rows x = *this;
    if (indptr != nullptr) {
      x.absent = count - own();
      x.data += (place() - place_of_block()) * head + row_of(0) * row;
    }
    x.indptr = nullptr;
    return x;
  }
  /// Of this block's head.
  KVMELD_DEVICE const Scalar* at(index_t, index_t g, index_t i) const {
    return data + place() * head + g * group + row_of(i) * row;
  }
  /// Of query `i`, for a head that has seen `next_position` tokens; −1: the head has no such query.
  KVMELD_DEVICE index_t position_of(index_t, index_t i, index_t next_position) const {
    return position != nullptr ? position[place_of_block() * position_head + i]
           : has(i)            ? next_position - count + i
                               : -1;
  }
  /// Are there queries of head `h`?
  KVMELD_DEVICE bool asks(index_t) const { return true; }
  /// What a policy with a window measures on: the last `window` of a prompt's own with those before
  /// them, or all that was chosen.
  query_rows reference(index_t window) const {
    query_rows x = *this;
    if (indptr != nullptr) {  // which end together
      x.count = count > window ? window : count;
    } else if (position == nullptr) {
      const index_t all = count + before, skip = all > window ? all - window : 0;
      x.data += (skip - before) * row;
      x.count = all - skip, x.before = skip;
      x.log_sum_exp =
          skip < before || log_sum_exp == nullptr ? nullptr : log_sum_exp + skip - before;
      x.log_sum_row = log_sums_apart();
    }
    return x;
  }
  KVMELD_HD std::ptrdiff_t log_sums_apart() const { return log_sum_row > 0 ? log_sum_row : count; }
  bool aligned() const {
    constexpr auto n = static_cast<std::ptrdiff_t>(16 / sizeof(Scalar));
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && head % n == 0 && group % n == 0 &&
           row % n == 0;
  }
};

/// Refuses fewer than `least` queries of a group, and queries that are nowhere.
template <class Scalar>
void check(const query_rows<Scalar>& queries, index_t least, index_t group, const char* what) {
  expects(queries.count >= least && queries.before >= 0 &&
              (queries.count == 0 || queries.data != nullptr),
          what, ": expected ", least > 0 ? "at least 1 query" : "queries",
          " and a count of at least 0 before them, got ", queries.count, " and ", queries.before);
  const index_t most = max_queries / ((group + group_block - 1) / group_block);
  expects(queries.count <= most && queries.before <= most - queries.count, what,
          ": expected at most ", most, " queries with those before them, got ", queries.count,
          " and ", queries.before);
  expects(queries.indptr == nullptr ||
              (queries.before == 0 && queries.position == nullptr && queries.heads > 0 &&
               (queries.log_sum_exp == nullptr || queries.log_sum_row > 0)),
          what, ": expected an indptr with at least 1 head, a log_sum_row of its log_sum_exp, and ",
          "neither positions nor queries before, got others");
}

namespace detail {

/// The scalar in which keys and queries are multiplied.
template <class Scalar, class Queries>
using product_scalar =
    std::conditional_t<std::is_same_v<Scalar, typename Queries::scalar>, Scalar, float>;

/// The mass function of all policies but those that share entries: `ℓ = scale · q·k + log-mass`;
/// that is also what observing starts from, `observed`.
struct log_masses {
  template <class Scalar>
  KVMELD_DEVICE float operator()(const cache_view<Scalar>& cache, index_t, index_t, float dot,
                                 float mass, float& observed) const {
    return observed = cache.scale * dot + mass;
  }
};

/// log Σ_j exp ℓ_ij of every query, over the slots at or before its position. A block holds a tile
/// of one query head's queries and streams the keys past it, two tiles in turn, each in flight
/// while the other is multiplied; tiles that no query of the block sees are not loaded. Every lane
/// keeps maximum and sum of its own columns.
template <class Scalar, index_t Depth, class Queries = query_rows<row_number<Scalar>>,
          class Masses = log_masses>
struct query_log_sums {
  using shape = tile_shape<product_scalar<Scalar, Queries>, Depth>;
  static constexpr index_t threads = shape::threads;
  struct shared_memory {
    typename shape::row_array queries;
    typename shape::column_array keys[2];
    shared_array<float, shape::columns> mass[2];
    shared_array<index_t, shape::columns> position[2];
  };

  cache_view<Scalar> cache;
  Queries queries;
  float* log_sum_exp;  // [heads, group, count]
  bool aligned;
  Masses masses = {};

  /// Grid: heads, query heads of one, tiles of queries.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const auto g = block_y();
    const index_t i0 = block_z() * shape::rows;
    const index_t n = cache.length[h], next_position = cache.next_position[h];
    if (!queries.asks(h)) {
      return;
    }
    if constexpr (requires { masses.differ(cache, h); }) {
      if (!masses.differ(cache, h)) {
        return;
      }
    }
    shape::template load<shape::rows>(
        shared.queries,
        [&](index_t r) { return queries.has(i0 + r) ? queries.at(h, g, i0 + r) : nullptr; },
        queries.data, cache.dim, aligned);
    commit_async();
    index_t own[shape::row_tiles][2], latest = -1;  // positions of this lane's queries
    float max[shape::row_tiles][2], sum[shape::row_tiles][2];
    unrolled<shape::row_tiles, 2>([&](index_t m, index_t i) {
      const index_t q = i0 + shape::row(m, 2 * i);
      own[m][i] = q < queries.count ? queries.position_of(h, q, next_position) : -1;
      max[m][i] = lowest_score, sum[m][i] = 0;
    });
    for (index_t r = lane(); r < shape::rows && i0 + r < queries.count; r += 32) {
      const index_t p = queries.position_of(h, i0 + r, next_position);
      latest = p > latest ? p : latest;
    }
    latest = reduce_max(latest);

    const auto keys = cache.keys.of(h);
    const auto next = [&](index_t s0) {  // the next tile that is seen; the same in every warp
      for (; s0 < n; s0 += shape::columns) {
        bool sees = false;
        for (index_t c = lane(); c < shape::columns && s0 + c < n; c += 32) {
          sees = sees || cache.position_of(h)[s0 + c] <= latest;
        }
        if (ballot(sees) != 0) {
          break;
        }
      }
      return s0;
    };
    const auto load = [&](index_t s0, index_t turn) {
      if (s0 < n) {
        shape::template load<shape::columns>(
            shared.keys[turn], [&](index_t c) { return s0 + c < n ? keys.at(s0 + c) : nullptr; },
            cache.keys.data, cache.dim, aligned);
        for (index_t c = thread_index(); c < shape::columns; c += threads) {
          const bool is = s0 + c < n;
          shared.mass[turn][c] = is ? cache.log_mass_of(h)[s0 + c] : 0.0F;
          shared.position[turn][c] = is ? cache.position_of(h)[s0 + c] : latest + 1;
        }
      }
      commit_async();
    };
    index_t s0 = next(0), turn = 0;
    load(s0, 0);
    while (s0 < n) {
      const index_t after = next(s0 + shape::columns);
      load(after, turn ^ 1);
      wait_async<1>();
      sync_block();
      typename shape::products x;
      shape::multiply(shared.queries, shared.keys[turn], cache.dim, x);
      cap_products(cache, x);
      unrolled<shape::row_tiles, 2>([&](index_t m, index_t i) {
        float higher = max[m][i];
        KVMELD_UNROLL
        for (index_t c = 0; c < shape::column_tiles; ++c) {
          KVMELD_UNROLL
          for (index_t j = 2 * i; j < 2 * i + 2; ++j) {
            const index_t column = shape::column(c, j);
            float& l = x[m][c][j];
            float logit = 0;
            l = shared.position[turn][column] <= own[m][i]
                    ? masses(cache, h, s0 + column, l, shared.mass[turn][column], logit)
                    : lowest_score;
            higher = l > higher ? l : higher;
          }
        }
        float more = 0;
        KVMELD_UNROLL
        for (index_t c = 0; c < shape::column_tiles; ++c) {
          KVMELD_UNROLL
          for (index_t j = 2 * i; j < 2 * i + 2; ++j) {
            more += weight(x[m][c][j], higher);
          }
        }
        sum[m][i] = sum[m][i] * weight(max[m][i], higher) + more;
        max[m][i] = higher;
      });
      sync_block();  // the tile may be overwritten
      s0 = after, turn ^= 1;
    }
    wait_async<0>();
    unrolled<shape::row_tiles, 2>([&](index_t m, index_t i) {
      const float higher = reduce_max(max[m][i], 4);
      const float all = reduce_sum(sum[m][i] * weight(max[m][i], higher), 4);
      const index_t q = i0 + shape::row(m, 2 * i);
      if (lane() % 4 == 0 && q < queries.count) {
        log_sum_exp[(std::ptrdiff_t{h} * cache.group + g) * queries.count + q] =
            with_sink(cache, h, g, all == 0 ? lowest_score : higher + logarithm(all));
      }
    });
  }

  KVMELD_DEVICE static float weight(float x, float max) {
    return x == lowest_score ? 0.0F : exponential(x - max);
  }
};

}  // namespace detail

}  // namespace kvmeld::cuda
