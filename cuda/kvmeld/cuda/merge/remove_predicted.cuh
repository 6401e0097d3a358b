// SPDX-License-Identifier: MIT
/// The end of a step's second launch for policies that merge the removed slot into its nearest.
#pragma once

#include "kvmeld/cuda/merge/join_nearest.cuh"
#include "kvmeld/cuda/merge/predicted_slots.cuh"

namespace kvmeld::cuda::detail {

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
