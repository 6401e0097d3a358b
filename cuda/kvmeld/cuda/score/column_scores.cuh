// SPDX-License-Identifier: MIT
/// Column sums of a prompt's causal attention, without ever holding the attention.
#pragma once

#include <algorithm>  // std::min
#include <cmath>      // std::abs, std::log, std::log2

#include "kvmeld/cuda/score/add_parts.cuh"
#include "kvmeld/cuda/score/slot_sums.cuh"
#include "kvmeld/cuda/score/stream_columns.cuh"

namespace kvmeld::cuda {

/// What to sum, as in `kvmeld::column_options`.
struct column_options {
  index_t window = 0;
  float decay = 1;
  group_combine combine = group_combine::sum;
  const float* log_sum_exp =
      nullptr;  ///< [heads, group, count] if attention left it; null: computed
};

namespace detail {

/// Do tensor cores take rows of this kind? Others take the plain path.
template <class Scalar, class Queries>
bool streams(const cache_view<Scalar>& cache, const Queries& queries) {
  const float scale = std::abs(cache.scale);  // log-masses are divided by it
  return cache.keys.aligned() && queries.aligned() && cache.dim % 8 == 0 && cache.dim <= 128 &&
         scale > 1e-12F && scale < 1e12F && queries.count <= 1 << 26;
}

/// The sums of one call on tensor cores, launch by launch.
template <class Scalar, index_t Depth, class Queries>
struct column_streams {
  const cache_view<Scalar>& cache;
  const Queries& queries;
  const column_memory& memory;
  stream on;

  grouped_queries grouped() const { return {queries.count, cache.group}; }
  index_t places() const { return static_cast<index_t>(cache.blocks()); }
  index_t log_sum_parts() const { return column_parts(places(), grouped().size(), cache.capacity); }
  index_t sum_parts() const { return column_parts(places(), cache.capacity, grouped().size()); }

  void log_sums(float* out) const {
    const index_t parts = log_sum_parts();
    const std::ptrdiff_t n = std::ptrdiff_t{places()} * cache.group * queries.count;
    pass<measured::log_sums>(grouped().size(), parts, nullptr, {},
                             {{parts == 1 ? out : memory.partial_log_sums}}, parts == 1 ? 0 : n);
    if (parts > 1) {
      using kernel = combine_log_sums<Scalar, Queries>;
      launch(kernel{cache, queries, memory.partial_log_sums, n, parts, out},
             {cache.blocks(), blocks_of(cache.group * queries.count, kernel::threads)}, on);
    }
  }

  void sums(const column_options& options, const column_sums& out, const float* log_sum_exp) const {
    const auto log2_decay = static_cast<float>(std::log2(static_cast<double>(options.decay)));
    const bool mean = options.combine == group_combine::mean;
    column_weights weights{.share = mean ? static_cast<float>(cache.group) : 1.0F};
    const int wanted = (out.total != nullptr ? 1 : 0) + (out.window != nullptr ? 1 : 0) +
                       (out.decayed != nullptr ? 1 : 0);
    if (wanted > 1) {
      weights.window = options.window, weights.log2_decay = log2_decay;
      sums<measured::three_sums>(log_sum_exp, weights, {{out.total, out.window, out.decayed}});
    } else if (out.total != nullptr) {
      sums<measured::one_sum>(log_sum_exp, weights, {{out.total}});
    } else if (out.window != nullptr) {
      weights.window = options.window;
      sums<measured::one_sum>(log_sum_exp, weights, {{out.window}});
    } else if (out.decayed != nullptr) {
      weights.log2_decay = log2_decay;
      sums<measured::one_sum>(log_sum_exp, weights, {{out.decayed}});
    }
    if (out.largest != nullptr && cache.soft_cap.cap == 0) {
      sums<measured::largest>(log_sum_exp, {}, {{out.largest}});
    }
  }

 private:
  struct pointers {
    float* to[3];
  };

  /// `out`: of the numbers that `What` keeps.
  template <measured What>
  void sums(const float* log_sum_exp, const column_weights& weights, const pointers& out) const {
    const index_t parts = sum_parts();
    if (parts == 1) {
      pass<What>(cache.capacity, 1, log_sum_exp, weights, out, 0);
      return;
    }
    constexpr std::ptrdiff_t numbers = What == measured::three_sums ? 3 : 1;
    const std::ptrdiff_t n = std::ptrdiff_t{places()} * cache.capacity;
    float* const partial = memory.partial_sums;
    pass<What>(cache.capacity, parts, log_sum_exp, weights,
               {{partial, partial + n, partial + 2 * n}}, numbers * n);
    using kernel = add_parts<Scalar, Queries, What == measured::largest, numbers>;
    launch(kernel{cache, queries, partial, n, parts, {out.to[0], out.to[1], out.to[2]}},
           {cache.blocks(), blocks_of(cache.capacity, kernel::threads)}, on);
  }

  template <measured What>
  void pass(index_t rows, index_t parts, const float* log_sum_exp, const column_weights& weights,
            const pointers& out, std::ptrdiff_t part_stride) const {
    using kernel = stream_columns<Scalar, Depth, What, Queries>;
    using shape = typename kernel::shape;
    const index_t columns = kernel::of_queries ? cache.capacity : grouped().size();
    launch(
        kernel{cache,
               queries,
               grouped(),
               log_sum_exp,
               weights,
               {out.to[0], out.to[1], out.to[2]},
               part_stride,
               std::min(shape::columns, (columns + shape::turn - 1) / shape::turn * shape::turn)},
        {cache.blocks(), blocks_of(rows, stream_rows), blocks_of(parts)}, on);
  }
};

/// log Σ exp of every query's logits over the slots that it sees, into `out [heads, group, count]`.
/// Those that the queries bring are taken. One launch, two where slots are split.
template <class Scalar, class Queries>
void log_sums(const cache_view<Scalar>& cache, const Queries& queries, const column_memory& memory,
              float* out, stream stream) {
  if constexpr (requires { queries.log_sum_exp; }) {
    if (queries.log_sum_exp != nullptr) {
      using take = take_log_sums<Scalar, Queries>;
      const index_t all = cache.group * queries.count;
      return launch(take{cache, queries, out}, {cache.blocks(), blocks_of(all, take::threads)},
                    stream);
    }
  }
  if constexpr (sizeof(product_scalar<Scalar, Queries>) == 2) {
    if (streams(cache, queries)) {
      return with_depth<64, 128>(cache.dim, [&](auto depth) {
        column_streams<Scalar, decltype(depth)::value, Queries>{cache, queries, memory, stream}
            .log_sums(out);
      });
    }
  }
  with_depth<128, 256>(cache.dim, [&](auto depth) {
    using kernel = query_log_sums<Scalar, decltype(depth)::value, Queries>;
    const auto tiles = blocks_of(queries.count, kernel::shape::rows);
    launch(kernel{cache, queries, out, cache.aligned() && queries.aligned()},
           {cache.blocks(), blocks_of(cache.group), tiles}, stream);
  });
}

/// `column_scores` without its checks. A log-sum-exp that is not given is left in `memory`.
template <class Scalar, class Queries>
void column_scores(const cache_view<Scalar>& cache, const Queries& queries,
                   const column_options& options, const column_sums& out,
                   const column_memory& memory, stream stream) {
  const float* given = options.log_sum_exp;
  if (given == nullptr) {
    log_sums(cache, queries, memory, memory.log_sum_exp, stream);
    given = memory.log_sum_exp;
  }
  column_sums rest = out;
  if constexpr (sizeof(product_scalar<Scalar, Queries>) == 2) {
    const bool maxima = options.combine == group_combine::max && cache.group > 1;
    if (!maxima && streams(cache, queries)) {
      rest = {.largest = cache.soft_cap.cap == 0 ? nullptr : out.largest};
      with_depth<64, 128>(cache.dim, [&](auto depth) {
        column_streams<Scalar, decltype(depth)::value, Queries>{cache, queries, memory, stream}
            .sums(options, out, given);
      });
      if (rest.largest == nullptr) {
        return;
      }
    }
  }
  with_depth<128, 256>(cache.dim, [&](auto depth) {
    using kernel = slot_sums<Scalar, decltype(depth)::value, Queries>;
    const auto tiles = blocks_of(cache.capacity, kernel::shape::rows);
    launch(kernel{cache, queries, given, rest, options.combine, options.window,
                  static_cast<float>(std::log(static_cast<double>(options.decay))),
                  cache.aligned() && queries.aligned()},
           {cache.blocks(), tiles}, stream);
  });
}

}  // namespace detail

/// `kvmeld::column_scores` of all heads: `a_ij = softmax_j(scale · q_i·k_j + log_mass_j)` over the
/// slots at or before query `i`'s position, summed over `i`, or the largest of them; the first
/// `length` numbers of each head's `[capacity]` are written. Two launches, one when the log-sum-exp
/// is given, one more for each of these where rows are few and columns are split. half and bfloat16
/// with rows at multiples of 16 bytes and a dim of 8, 16 ... 128 stream past tensor cores: K is
/// read once per 256 queries, Q once per 256 slots. The rest, sums of a group's largest, and the
/// largest under a soft cap take a plain path of half the tile. Deterministic: the parts depend on
/// the shape alone. Memory: `column_scores_workspace_bytes`, whatever is asked.
template <class Scalar>
void column_scores(const cache_view<Scalar>& cache, const query_rows<row_number<Scalar>>& queries,
                   const column_options& options, const column_sums& out, workspace memory,
                   stream stream) {
  check(cache);
  expects(queries.count > 0 && queries.data != nullptr,
          "cuda column_scores: expected at least 1 query, got ",
          queries.data == nullptr ? 0 : queries.count);
  check(queries, 1, cache.group, "cuda column_scores");
  expects(options.decay > 0 && options.decay <= 1,
          "cuda column_scores: expected a decay in (0, 1], got ", options.decay);
  expects(options.window >= 0, "cuda column_scores: expected a window of at least 0 queries, got ",
          options.window);
  workspace_allocator from(memory);
  detail::column_memory work;
  work.allocate(from, cache.heads, cache.group, queries.count, cache.capacity);
  from.check("cuda column_scores", "column_scores_workspace_bytes");
  detail::column_scores(cache, queries, options, out, work, stream);
}

}  // namespace kvmeld::cuda
