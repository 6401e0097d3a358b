// SPDX-License-Identifier: MIT
/// Lookahead on the device: a prompt's queries, moved to the positions to come.
#pragma once

#include "kvmeld/cuda/memory/rope_params.cuh"
#include "kvmeld/cuda/score/queries.cuh"
#include "kvmeld/score/observation.hpp"

namespace kvmeld::cuda {

namespace detail {

/// Where a spread over so many queries begins, that leaves out the first `blind`.
KVMELD_HD inline index_t first_spread(index_t queries, index_t blind = score::blind_queries) {
  return queries > blind ? blind : queries - 1;
}

/// Queries that are spread over a prompt, turned to the positions to come.
template <class Scalar>
struct move_ahead {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  using number = row_number<Scalar>;
  cache_view<Scalar> cache;
  query_rows<number> queries;
  rope_params rope;
  future_positions ahead;
  index_t blind, count;
  number* to;         // [heads, group, count, dim]
  index_t* position;  // [heads, count]; null: not wanted

  /// Grid: heads, query heads of one, any number of blocks that share the queries.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head(), pairs = rope_params::pairs(cache.dim);
    const auto g = block_y();
    const index_t seen = cache.next_position[h], all = queries.own(),
                  first = first_spread(all, blind), n = count < all - first ? count : all - first;
    number* const rows =
        to + (std::ptrdiff_t{place_of_block()} * cache.group + g) * count * cache.dim;
    const auto block = block_z();
    const auto step = grid_z() * threads;
    for (index_t e = block * threads + thread_index(); e < count * pairs; e += step) {
      const index_t i = e / pairs, p = e % pairs;
      // A shorter prompt has fewer, the last ones, before which its first is repeated.
      const index_t j = i < count - n ? 0 : i - (count - n);
      const index_t from = queries.count - all + score::spread_query(j, n, all, first);
      const index_t moved = seen + score::future_position(j, n, ahead.horizon, ahead.fade);
      number* const row = rows + std::ptrdiff_t{i} * cache.dim;
      rope.pair(queries.at(h, g, from), cache.dim, p, moved - queries.position_of(h, from, seen),
                [&](index_t k, float x) { row[k] = from_float<number>(x); });
      if (position != nullptr && g == 0 && p == 0) {
        position[std::ptrdiff_t{place_of_block()} * count + i] = moved;
      }
    }
  }
};

}  // namespace detail

/// How many queries `lookahead` makes of a prompt's `queries`.
inline index_t lookahead_count(index_t queries, const lookahead_options& options = {}) {
  expects(queries > 0, "cuda lookahead: expected queries");
  expects(options.count > 0, "cuda lookahead: expected at least 1 query, got ", options.count);
  const index_t rest = queries - detail::first_spread(queries);
  return options.count < rest ? options.count : rest;
}

/// `evaluate::lookahead` of examples/evaluate: queries spread over the prompt, turned to the
/// positions to come, into `out [heads, group, lookahead_count, dim]` and `position [heads,
/// lookahead_count]`, which `compress` takes with `position_head = lookahead_count`. One launch.
/// Refused: a rotation of part of a head, prompts of several lengths.
template <class Scalar>
void lookahead(const cache_view<Scalar>& cache, const query_rows<row_number<Scalar>>& queries,
               const lookahead_options& options, row_number<Scalar>* out, index_t* position,
               stream stream) {
  check(cache);
  const rope_params rope =
      cache.spec == nullptr ? rope_params{} : rope_params_of(cache.spec->rope, cache.dim);
  options.ahead.validate("cuda lookahead");
  const index_t count = lookahead_count(queries.count, options);
  expects(queries.data != nullptr && out != nullptr && position != nullptr,
          "cuda lookahead: expected queries, positions and an output, got null");
  check(queries, 1, cache.group, "cuda lookahead");
  expects(errc::unsupported, queries.indptr == nullptr,
          "cuda lookahead: expected prompts of one length, got an indptr");
  launch(detail::move_ahead<Scalar>{cache, queries, rope, options.ahead, score::blind_queries,
                                    count, out, position},
         {cache.blocks(), blocks_of(cache.group)}, stream);
}

}  // namespace kvmeld::cuda
