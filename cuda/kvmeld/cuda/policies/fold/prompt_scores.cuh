// SPDX-License-Identifier: MIT
/// fold by scores: what of a prompt will be asked for, a number for every slot.
#pragma once

#include <limits>  // std::numeric_limits

#include "kvmeld/cuda/policies/fold/leverage.cuh"
#include "kvmeld/cuda/policies/fold/reference.cuh"
#include "kvmeld/cuda/score/column_scores.cuh"
#include "kvmeld/cuda/score/lookahead.cuh"

namespace kvmeld::cuda::detail {

/// What a prompt's scores are computed in.
struct score_scratch {
  leverage_scratch leverage;
  column_memory measure;  ///< its log-sum-exp is the moved queries' own
  index_t* planned;       ///< [heads] −1: there is no slot
  float* first;           ///< [heads, group, queries] log-sum-exp of the queries' first reading
  float* both;            ///< [group, heads, queries] of both
  float* largest;         ///< [group, heads, capacity]
  float* score;           ///< [heads, capacity]
  void* moved;            ///< [active heads, group, queries, dim] of the cache's numbers

  void allocate(workspace_allocator& from, const work_shape& shape) {
    const std::size_t n = shape.all_heads(), slots = shape.slots();
    const auto group = static_cast<std::size_t>(shape.group),
               d = static_cast<std::size_t>(shape.dim);
    const index_t queries = shape.queries + shape.before;
    const std::size_t of_head = group * static_cast<std::size_t>(queries);
    leverage.allocate(from, shape);
    measure.allocate(from, shape.heads, shape.group, queries, shape.capacity);
    planned = from.take<index_t>(n);
    first = from.take<float>(n * of_head), both = from.take<float>(n * of_head);
    largest = from.take<float>(group * slots), score = from.take<float>(slots);
    moved = from.take<char>(static_cast<std::size_t>(shape.active) * of_head * d *
                            static_cast<std::size_t>(shape.number_bytes));
  }
};

/// `ln(exp first + exp moved)`, member by member.
template <class Scalar>
struct join_log_sums {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  cache_view<Scalar> cache;
  const index_t* planned;      // [heads]
  const float *first, *moved;  // [heads, group, count]
  query_rows<Scalar> queries;
  float* both;  // [group, heads, count]

  /// Grid: heads, query heads of one, stretches of `threads` queries.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head(), count = queries.count, i = block_z() * threads + thread_index();
    const auto g = block_y();
    if (planned[h] < 0 || i >= count) {
      return;
    }
    const std::ptrdiff_t at = (std::ptrdiff_t{h} * cache.group + g) * count + i;
    const float a = first[at], b = moved[at], most = a > b ? a : b, least = a > b ? b : a;
    both[(std::ptrdiff_t{g} * cache.heads + h) * count + i] =
        !queries.has(i)         ? lowest_score
        : least == lowest_score ? most
                                : most + logarithm(1.0F + exponential(least - most));
  }
};

/// `‖v‖` times the mean of the group's largest probabilities. A warp a slot: reads V once.
template <class Scalar>
struct weigh_largest {
  static constexpr index_t threads = 256, slots = 64;
  struct shared_memory {};

  cache_view<Scalar> cache;
  const index_t* planned;  // [heads]
  const float* largest;    // [group, heads, capacity]
  float* score;            // [heads, capacity]
  bool aligned;

  /// Grid: heads, stretches of `slots`.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head(), n = cache.length[h];
    const index_t s0 = block_y() * slots;
    if (planned[h] < 0) {
      return;
    }
    const auto values = cache.values.of(h);
    const std::ptrdiff_t member = std::ptrdiff_t{cache.heads} * cache.capacity;
    for (index_t s = s0 + warp(); s < n && s < s0 + slots; s += threads / 32) {
      const float square = square_of(values.at(s), cache.dim, aligned);
      if (lane() == 0) {
        float sum = 0;
        for (index_t g = 0; g < cache.group; ++g) {
          sum += largest[g * member + cache.slot(h, s)];
        }
        score[cache.slot(h, s)] = square_root(square) * sum / static_cast<float>(cache.group);
      }
    }
  }
};

/// Times leverage over its mean, into the column: with all queries since the first that scored
/// these are the scores of one pass; with fewer a slot keeps its largest. A block a head.
template <class Scalar>
struct keep_scores {
  static constexpr index_t threads = 512;
  struct shared_memory {
    of_warps<float, threads> sum;
  };

  cache_view<Scalar> cache;
  state_view state;
  fold_rule rule;
  const index_t* planned;         // [heads]
  const float *score, *leverage;  // [heads, capacity]
  query_rows<Scalar> queries;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), n = cache.length[h];
    if (planned[h] < 0) {
      return;
    }
    const float sum =
        block_total(shared.sum, n, [&](index_t s) { return leverage[cache.slot(h, s)]; });
    const float mean = sum / static_cast<float>(n);
    const fold_floats memory = rule.memory_of(cache, state, h);
    const fold_floats::positions before = memory.scored();
    const index_t end = cache.next_position[h], begin = end - queries.own();
    const bool all = before.begin == before.end || begin <= before.begin;
    float* const held = state.column(fold_rule::prompt_score, h);
    for (index_t s = thread_index(); s < n; s += threads) {
      float now = score[cache.slot(h, s)];
      now = mean > 0 ? now * (leverage[cache.slot(h, s)] / mean) : now;  // 0: all keys are alike
      held[s] = all || held[s] < now ? now : held[s];
    }
    sync_block();  // all have read the memory
    if (thread_index() == 0) {
      memory.set_scored({all ? begin : before.begin, end});
    }
  }
};

/// `kvmeld::prompt_scores` of all heads into their column, by a prompt's own queries, all of them:
/// each is moved after the prompt, and a slot has the largest probability that any gives it beside
/// what the query found in its own reading. Moved queries are rounded to its numbers, as
/// those of a second reading would be. Ten launches and one a query head of the group; one more
/// for each pass over columns that is split.
template <class Scalar>
void score_prompt(const fold_rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                  const query_rows<Scalar>& queries, const score_scratch& work, stream stream) {
  const auto heads = cache.blocks(), group = blocks_of(cache.group);
  leverage_of_keys(cache, state, rule, budget{.slots = 0}, false, nullptr, work.planned,
                   work.leverage, stream);
  log_sums(cache, queries, work.measure, work.first, stream);

  auto* const rows = static_cast<Scalar*>(work.moved);
  constexpr index_t queries_a_block = 64;
  launch(move_ahead<Scalar>{cache,
                            queries,
                            rule.turn,
                            {rule.score_horizon, std::numeric_limits<float>::infinity()},
                            0,
                            queries.count,
                            rows,
                            nullptr},
         {heads, group, blocks_of(queries.count, queries_a_block)}, stream);
  const std::ptrdiff_t member = std::ptrdiff_t{queries.count} * cache.dim;
  const query_rows<Scalar> moved{rows, queries.count, cache.group * member, member, cache.dim};
  const auto seeing_all = [&](const query_rows<Scalar>& x) {
    return chosen_rows<Scalar>{x, x.data, x.count, work.planned};
  };
  log_sums(cache, seeing_all(moved), work.measure, work.measure.log_sum_exp, stream);
  using join = join_log_sums<Scalar>;
  launch(join{cache, work.planned, work.first, work.measure.log_sum_exp, queries, work.both},
         {heads, group, blocks_of(queries.count, join::threads)}, stream);

  cache_view<Scalar> alone = cache;  // a member of the group is a group of its own
  alone.group = 1;
  for (index_t g = 0; g < cache.group; ++g) {
    query_rows<Scalar> of_member = moved;
    of_member.data += g * member;
    column_scores(alone, seeing_all(of_member),
                  {.log_sum_exp = work.both + std::ptrdiff_t{g} * cache.heads * queries.count},
                  {.largest = work.largest + std::ptrdiff_t{g} * cache.heads * cache.capacity},
                  work.measure, stream);
  }
  using weigh = weigh_largest<Scalar>;
  launch(weigh{cache, work.planned, work.largest, work.score, cache.aligned()},
         {heads, blocks_of(cache.capacity, weigh::slots)}, stream);
  launch(keep_scores<Scalar>{cache, state, rule, work.planned, work.score, work.leverage.leverage,
                             queries},
         {heads}, stream);
}

}  // namespace kvmeld::cuda::detail
