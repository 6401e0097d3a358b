/// Combining the splits, observing, and removing one slot: the second of a step's launches.
#pragma once

#include "kvfold/cuda/device/last_block.cuh"
#include "kvfold/cuda/merge/slot_removals.cuh"
#include "kvfold/cuda/score/attend_splits.cuh"
#include "kvfold/cuda/score/rule.cuh"

namespace kvfold::cuda::detail {

/// Options of the second launch of a step.
struct step_options {
  bool appended = false;  ///< the first launch put a new token behind the last slot
  index_t target = 0;     ///< slots after the step; 0: no slot is removed here
};

/// A block takes 1024 slots of a head: every slot's probability from its logits, the group
/// combined, into the policy's score, and the tile's candidate for removal. The head's output is
/// spread over its blocks. The last block of a head to finish (a ticket says which) removes the
/// slot: another launch would cost more than its dozen rows. Reads 4 · group bytes of logits
/// and the rule's columns, writes the columns; K and V are not read again, but for the rows that
/// move.
template <class Scalar, class Rule>
struct observe_and_remove {
  static constexpr index_t threads = 256;
  struct shared_memory {
    shared_array<float, most_splits * max_group> scale;  // of each split's output
    shared_array<float, max_group> max, inverse;
    of_warps<candidate, threads> best;
    of_warps<index_t, threads> number;
    shared_array<index_t, 1> ticket;
  };

  cache_view<Scalar> cache;
  state_view state;
  partial_attention from;
  Rule rule;
  step_options options;
  const Scalar* queries;  // [heads, group, dim]
  Scalar* out;            // [heads, group, dim]
  float* log_sum_exp;     // [heads, group], or null
  bool aligned;

  /// Grid: heads, tiles.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const auto tile = static_cast<index_t>(block_index().y);
    const bool full = options.appended && cache.length[h] >= cache.capacity;
    const index_t n = cache.length[h] + (options.appended && !full ? 1 : 0);
    const head_context head = context_of(
        cache, state, h, options.appended ? cache.tokens_total[h] : cache.tokens_total[h] - 1);
    combine(shared, h, tile, full);
    const candidate mine = full ? candidate{0} : observe(shared, head, h, tile, n);
    if (!Rule::observes && !remembers<Rule> && !options.appended) {
      return;
    }
    const auto least = best_of_tiles(shared.ticket, shared.best, from.tickets + h, from.best_of(h),
                                     tile, from.tiles, mine);
    if (least.last) {  // lengths change when all blocks of the head have read them
      finish(shared, head, h, n, least.of == 0 ? -1 : least_slot(least.of));
    }
  }

 private:
  /// Output and log-sum-exp from the splits', weighted in a fixed order.
  KVFOLD_DEVICE void combine(shared_memory& shared, index_t h, index_t tile, bool full) const {
    const std::ptrdiff_t parts = std::ptrdiff_t{h} * from.splits * cache.group;
    for (index_t g = warp(); g < cache.group; g += threads / 32) {
      float max = lowest_score, sum = 0;
      for (index_t p = lane(); p < from.splits; p += 32) {
        const float m = from.max[parts + p * cache.group + g];
        max = m > max ? m : max;
      }
      max = reduce_max(max);
      for (index_t p = lane(); p < from.splits; p += 32) {
        const float m = from.max[parts + p * cache.group + g];
        const float scale = m == lowest_score ? 0.0F : exponential(m - max);
        shared.scale[p * max_group + g] = scale;
        sum += scale * from.sum[parts + p * cache.group + g];
      }
      sum = reduce_sum(sum);
      if (lane() == 0) {
        shared.max[g] = max;
        shared.inverse[g] = full       ? lowest_score - lowest_score  // NaN: there was no room
                            : sum == 0 ? 0.0F
                                       : 1.0F / sum;
        if (tile == 0 && log_sum_exp != nullptr) {
          log_sum_exp[std::ptrdiff_t{place_of_block()} * cache.group + g] = max + logarithm(sum);
        }
      }
    }
    sync_block();
    for (index_t e = tile * threads + thread_index(); e < cache.group * cache.dim;
         e += from.tiles * threads) {
      const index_t g = e / cache.dim;
      float x = 0;
      for (index_t p = 0; p < from.splits; ++p) {
        x += shared.scale[p * max_group + g] * from.out[(parts + p * cache.group) * cache.dim + e];
      }
      out[std::ptrdiff_t{place_of_block()} * cache.group * cache.dim + e] =
          from_float<Scalar>(x * shared.inverse[g]);
    }
  }

  /// The tile's slots: fresh columns, scores, and which slot would be evicted first.
  KVFOLD_DEVICE candidate observe(shared_memory& shared, const head_context& head, index_t h,
                                  index_t tile, index_t n) const {
    const auto probability = [&](index_t g, float l) {
      return exponential(l - shared.max[g]) * shared.inverse[g];
    };
    candidate best = 0;
    const index_t end = (tile + 1) * slots_a_tile < n ? (tile + 1) * slots_a_tile : n;
    for (index_t s = tile * slots_a_tile + thread_index(); s < end; s += threads) {
      if (options.appended && s == n - 1) {
        for (index_t c = 0; c < state.count; ++c) {
          head.column(c, s) = state.initial[c];
        }
      }
      if constexpr (shares_entries<Rule>) {
        rule.observe_entry(cache, state, h, s, from.logits + cache.slot(h, s) * cache.group,
                           probability);
      } else if constexpr (seeks_logits<Rule>) {
        rule.observe_logits(head, s, from.logits + cache.slot(h, s) * cache.group, cache.group);
      } else if constexpr (Rule::observes) {
        const float* const logit = from.logits + cache.slot(h, s) * cache.group;
        rule.observe(head, s, combined(rule.combine, cache.group, [&](index_t g) {
                       return probability(g, logit[g]);
                     }));
      }
      if constexpr (Rule::evicts && !shares_entries<Rule>) {
        if (options.target > 0 && !rule.is_protected(head, s)) {
          const candidate c = least_candidate(rule.order(head, s), s);
          best = c > best ? c : best;
        }
      }
    }
    return best;
  }

  /// One block, when all of the head is observed.
  KVFOLD_DEVICE void finish(shared_memory& shared, const head_context& head, index_t h, index_t n,
                            index_t removed) const {
    const bool fresh = n > cache.length[h];  // else there was no room
    bool removes =
        Rule::evicts && fresh && options.target > 0 && n == options.target + 1 && removed >= 0;
    if constexpr (remembers<Rule>) {
      if (fresh || !options.appended) {
        rule.template remember<threads>(
            cache, state, h, queries + std::ptrdiff_t{place_of_block()} * cache.group * cache.dim,
            head.newest);
      }
    }
    if (thread_index() == 0) {
      from.tickets[h] = 0;  // for a third launch
      if (fresh || !options.appended) {
        rule.observed(head);
      }
    }
    if constexpr (shares_entries<Rule>) {  // other launches remove a slot
      if (thread_index() == 0 && options.target > 0) {
        from.victims[h] = fresh && n == options.target + 1 ? 0 : -1;
      }
      if (thread_index() == 0 && fresh) {
        count_slots(cache, h, n);
      }
      return;
    }
    if constexpr (seeks_nearest<Rule>) {
      if (options.target > 0) {  // another launch finds the nearest
        if (thread_index() == 0) {
          from.victims[h] = removes ? removed : -1;
        }
        return;
      }
    }
    if constexpr (merges_removed<Rule>) {
      if (removes) {
        removes = rule.merge_removed(shared.number, shared.best, cache, state, head, h, n, removed);
      }
    }
    if (removes && removed != n - 1) {
      move_slot<threads>(cache, state, head, h, removed, n - 1, aligned);
    }
    const index_t left = removes ? n - 1 : n;
    if constexpr (merges_removed<Rule>) {
      sync_block();
      if (options.target > 0 && left <= options.target) {
        rule.after_compress(shared.number, shared.best, head, left);
      }
    }
    if (thread_index() == 0 && fresh) {
      count_slots(cache, h, left);
    }
  }
};

/// Both launches: attention over all splits, then what `options` says of the second.
template <class Scalar, class Rule>
void attend_and_observe(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                        const Scalar* queries, const new_tokens<Scalar>& fresh,
                        const step_options& options, partial_attention partial, Scalar* out,
                        float* log_sum_exp, stream stream) {
  expects(queries != nullptr && out != nullptr, "cuda attend: queries and out [", cache.heads, ", ",
          cache.group, ", ", cache.dim, "] expected, null came");
  partial.logits = Rule::observes ? partial.logits : nullptr;
  if constexpr (shares_entries<Rule>) {
    attend_splits(rule.masses(state, cache.capacity), cache, queries, fresh, partial, stream);
  } else {
    attend_splits(log_masses{}, cache, queries, fresh, partial, stream);
  }
  launch(observe_and_remove<Scalar, Rule>{cache, state, partial, rule, options, queries, out,
                                          log_sum_exp, cache.aligned()},
         {cache.blocks(), static_cast<unsigned>(partial.tiles)}, stream);
}

}  // namespace kvfold::cuda::detail
