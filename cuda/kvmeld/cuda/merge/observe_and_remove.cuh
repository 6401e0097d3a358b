// SPDX-License-Identifier: MIT
/// Combining the splits, observing, and removing one slot: the second of a step's launches, or the
/// end of its only one.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"
#include "kvmeld/cuda/memory/head_budgets.cuh"
#include "kvmeld/cuda/merge/observe_slots.cuh"
#include "kvmeld/cuda/merge/slot_removals.cuh"

namespace kvmeld::cuda::detail {

/// Options of the second launch of a step.
struct step_options {
  bool appended = false;  ///< the first launch put a new token behind the last slot
  bool removes = false;   ///< heads of one slot more than their targets lose one
  head_budgets limits = {};
};

/// A block takes a share of a head's slots: every slot's probability from its logits, the group
/// combined, into the policy's score, and the share's candidate for removal (`observe_slots`).
/// Where there were several splits, the head's output is spread over its blocks. The last block of
/// a head to finish (a ticket says which) removes the slot: another launch would cost more than its
/// dozen rows. K and V are not read again, but for the rows that move. Launched early: what
/// attention does not write is asked for before that has ended. It waits for its instructions as
/// for its data, so loops stay loops.
template <class Scalar, class Rule, index_t Threads = 512, index_t Splits = most_splits>
struct observe_and_remove {
  static constexpr index_t threads = Threads, resident = 1024 / threads;
  static_assert(slots_a_tile <= 32 * threads);
  using observing = observe_slots<Scalar, Rule, threads>;
  struct shared_memory {
    combined_splits<Splits> softmax;
    of_warps<candidate, threads> best;
    of_warps<index_t, threads> number;
    shared_array<index_t, 1> ticket;
  };

  cache_view<Scalar> cache;
  state_view state;
  partial_attention from;
  Rule rule;
  step_options options;
  const row_number<Scalar>* queries;  // [heads, group, dim]
  row_number<Scalar>* out;            // [heads, group, dim]
  float* log_sum_exp;                 // [heads, group], or null
  bool aligned;

  /// What is known before attention has ended.
  struct begun {
    index_t tile, n;
    bool full;  ///< there is no room for the new token
    head_context head;
    slot_tile own;
    unsigned stay;                     ///< protected slots
    typename observing::numbers held;  ///< but for the logits
  };

  /// Grid: heads, tiles.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    begun known = begin();
    wait_for_previous();
    finish(shared, known);
  }

  KVMELD_DEVICE begun begin() const {
    const index_t h = cache.head(), length = cache.length[h];
    const auto tile = block_y();
    const bool full = options.appended && length >= cache.capacity;
    const index_t n = length + (options.appended && !full ? 1 : 0);
    const index_t newest = cache.next_position[h] - (options.appended ? 0 : 1);
    begun known{tile,
                n,
                full,
                context_of(cache, state, h, newest),
                slot_tile::of(tile, from.tiles, full ? 0 : n),
                0,
                {}};
    if (options.appended) {
      begin_slot(known.head, known.own, n - 1);
    }
    const auto& mine = under_target(rule, target_of(h));
    const observing slots{cache, state, from, mine, known.head, known.own};
    known.stay = slots.look_ahead();
    slots.ask(known.held, slots.first());
    return known;
  }
  /// When attention has ended.
  KVMELD_DEVICE void finish(shared_memory& shared, begun& known) const {
    const index_t h = known.head.head, tile = known.tile;
    const auto& mine = under_target(rule, target_of(h));
    const observing slots{cache, state, from, mine, known.head, known.own};
    slots.ask_logits(known.held, slots.first(), 0);
    const combine_splits<Scalar, threads, observing::outputs_at_once> splits{cache, from, out,
                                                                             log_sum_exp};
    if (Rule::observes || from.splits > 1) {
      splits.weigh(shared.softmax, tile, known.full);
    }
    const candidate first = slots(shared.softmax, known.stay, known.held);
    sync_warp();                                // slots may differ in what there was to observe
    splits.write_output(shared.softmax, tile);  // now, when the logits' registers are free
    if constexpr (!Rule::observes && !remembers<Rule>) {
      if (!options.appended) {
        return;
      }
    }
    // Behind a barrier of `best_of_tiles` a thread changes the length.
    const bool fresh = known.n > cache.length[h];  // else there was no room, or no token
    const auto least = best_of_tiles(shared.ticket, shared.best, from.tickets + h, from.best_of(h),
                                     tile, from.tiles, options.removes ? first : candidate{0});
    if (least.last) {  // lengths change when all blocks of the head have read them
      end_head(shared, mine, known, fresh, least.of == 0 ? -1 : least_slot(least.of));
    }
  }

 private:
  KVMELD_DEVICE index_t target_of(index_t h) const {
    return options.removes ? options.limits.of(h).slots : 0;
  }

  /// The new token's numbers, of which the first launch knows nothing.
  KVMELD_DEVICE void begin_slot(const head_context& head, const slot_tile& own, index_t s) const {
    if (s < own.begin || s >= own.end || (s - own.begin) % threads != thread_index()) {
      return;
    }
    cache.log_mass_of(head.head)[s] = 0;
    cache.position_of(head.head)[s] = head.newest;
    KVMELD_ROLLED
    for (index_t c = 0; c < state.count; ++c) {
      head.column(c, s) = state.initial[c];
    }
  }

  /// One block, when all of the head is observed.
  KVMELD_DEVICE void end_head(shared_memory& shared, const Rule& mine, const begun& known,
                              bool fresh, index_t removed) const {
    const head_context& head = known.head;
    const index_t h = head.head, n = known.n;
    if constexpr (remembers<Rule>) {
      if (fresh || !options.appended) {
        mine.template remember<threads>(
            cache, state, h, queries + std::ptrdiff_t{place_of_block()} * cache.group * cache.dim,
            head.newest);
      }
    }
    if (thread_index() == 0 && (fresh || !options.appended)) {
      mine.observed(head);
    }
    index_t left = n;
    if constexpr (observing::evicts_one) {
      const index_t target = target_of(h);
      bool removes = options.removes && fresh && n == target + 1 && removed >= 0;
      if constexpr (merges_removed<Rule>) {
        removes = removes && mine.merge_removed(shared.number, shared.best, cache, state, head, h,
                                                n, removed, aligned);
      }
      if (removes && removed != n - 1) {
        move_slot<threads>(cache, state, head, h, removed, n - 1);
      }
      left = removes ? n - 1 : n;
      if constexpr (merges_removed<Rule>) {
        sync_block();
        if (options.removes && left <= target) {
          mine.after_compress(shared.number, shared.best, head, left);
        }
      }
    }
    if (thread_index() == 0 && fresh) {
      count_slots(cache, h, left);
    }
  }
};

}  // namespace kvmeld::cuda::detail
