// SPDX-License-Identifier: MIT
/// The end of a step's removal by similarity: the removed slot goes into its nearest.
#pragma once

#include "kvmeld/cuda/merge/predicted_slots.cuh"
#include "kvmeld/cuda/merge/slot_removals.cuh"
#include "kvmeld/cuda/score/compared_in_tiles.cuh"

namespace kvmeld::cuda::detail {

/// The last of a head's `n` slots as the nearest of slot `removed`; 0: it is the same. By every
/// warp of a block for itself: the tiles of a search end before the step's own token, which is
/// nowhere yet when they are read in attention.
template <class Scalar>
KVMELD_DEVICE candidate newest_candidate(const cache_view<Scalar>& cache, index_t h, index_t n,
                                         index_t removed, bool aligned) {
  if (removed == n - 1) {
    return 0;
  }
  constexpr index_t width = vector_16<Scalar>::size;
  const auto keys = cache.keys.of(h);
  const Scalar *const a = keys.at(removed), *const b = keys.at(n - 1);
  float dot = 0, squares[2] = {};
  KVMELD_ROLLED
  for (index_t i = lane() * width; i < cache.dim; i += 32 * width) {
    const auto x = load_row(a, i, cache.dim, aligned), y = load_row(b, i, cache.dim, aligned);
    KVMELD_UNROLL
    for (index_t j = 0; j < width; ++j) {
      dot += to_float(x[j]) * to_float(y[j]);
      squares[0] += to_float(x[j]) * to_float(x[j]), squares[1] += to_float(y[j]) * to_float(y[j]);
    }
  }
  const float lengths = square_root(reduce_sum(squares[0])) * square_root(reduce_sum(squares[1]));
  dot = reduce_sum(dot);
  return near_candidate(lengths > 0 ? dot / lengths : 0.0F, n - 1);
}

/// Slot `removed` of `n` merges into the nearest, the best of `best` and the newest, where
/// `rule.join_nearest` says so, and the newest takes its place. By a block.
template <index_t Threads, class Scalar, class Rule>
KVMELD_DEVICE void remove_into(const cache_view<Scalar>& cache, const state_view& state,
                               const head_context& head, const Rule& rule, index_t h, index_t n,
                               index_t removed, candidate best, bool aligned) {
  const candidate newest = newest_candidate(cache, h, n, removed, aligned);
  best = newest > best ? newest : best;
  if (best != 0) {
    const index_t into = most_slot(best);
    const joining how = rule.join_nearest(cache, head, h, into, removed,
                                          number_of(static_cast<unsigned>(best >> 32)));
    if (how.joins) {
      merge_slot<Threads>(cache, state, head, h, into, removed, how);
    }
  }
  if (removed != n - 1) {
    move_slot<Threads>(cache, state, head, h, removed, n - 1);
  }
  if (thread_index() == 0) {
    count_slots(cache, h, n - 1);
  }
}

/// Slot `removed` goes into its nearest where attention has compared it with all others; else
/// another launch finds the nearest.
template <class Scalar, class Rule, index_t Threads>
struct remove_predicted {
  const cache_view<Scalar>& cache;
  const state_view& state;
  const partial_attention& from;
  const Rule& rule;
  bool aligned;

  /// By the block that knows the slot, −1: none, when all of head `h` is observed; `fresh`: has it
  /// a new token? `next`: of the block's slots, those that the next step would evict.
  KVMELD_DEVICE void operator()(best_memory<Threads>& shared, const head_context& head, index_t h,
                                index_t n, index_t removed, bool fresh,
                                const best_two& next) const {
    const bool predicts = from.predicted != nullptr;
    const candidate nearest =
        predicts && removed >= 0 ? found_in_attention(from, h, n, removed) : candidate{0};
    if (predicts && fresh) {
      predict(shared, h, n, removed, next);
    }
    if (thread_index() == 0) {
      from.victims[h] = removed >= 0 && nearest == 0 ? removed : -1;
      if (fresh && removed < 0) {
        count_slots(cache, h, n);
      }
    }
    if (nearest != 0) {
      remove_into<Threads>(cache, state, head, rule, h, n, removed, nearest, aligned);
    }
  }

 private:
  /// What the next step may evict: the first of the slots that stay.
  KVMELD_DEVICE void predict(best_memory<Threads>& shared, index_t h, index_t n, index_t removed,
                             best_two next) const {
    if (from.tiles > 1) {  // those of all blocks
      next = {};
      KVMELD_ROLLED
      for (index_t e = thread_index(); e < from.tiles * compared_rows; e += Threads) {
        const candidate c = from.lowest_of(h, 0)[e];
        next.take(least_slot(c) == removed ? candidate{0} : c);
      }
    } else {
      next.leave_out(removed);
    }
    predict_slots(shared, from, h, n, removed, next);
  }
};

}  // namespace kvmeld::cuda::detail
