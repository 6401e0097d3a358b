/// Combining the splits, observing, and removing one slot: the second of a step's launches.
#pragma once

#include <type_traits>  // std::conditional_t

#include "kvfold/cuda/device/last_block.cuh"
#include "kvfold/cuda/memory/head_budgets.cuh"
#include "kvfold/cuda/merge/remove_predicted.cuh"
#include "kvfold/cuda/score/combine_splits.cuh"
#include "kvfold/cuda/score/rule.cuh"

namespace kvfold::cuda::detail {

/// Options of the second launch of a step.
struct step_options {
  bool appended = false;  ///< the first launch put a new token behind the last slot
  bool removes = false;   ///< heads of one slot more than their targets lose one
  head_budgets limits = {};
};

/// A block takes a share of a head's slots: every slot's probability from its logits, the group
/// combined, into the policy's score, and the share's candidate for removal. Where there were
/// several splits, the head's output is spread over its blocks. The last block of a head to finish
/// (a ticket says which) removes the slot: another launch would cost more than its dozen rows.
/// Reads 4 · group bytes of logits and the rule's columns, writes the columns; K and V are not read
/// again, but for the rows that move. Launched early. A launch of a few microseconds waits for its
/// instructions as for its data, so loops stay loops.
template <class Scalar, class Rule>
struct observe_and_remove {
  static constexpr index_t threads = 512, resident = 2;
  static_assert(slots_a_tile <= 32 * threads);
  static constexpr bool by_probability =
      Rule::observes && !shares_entries<Rule> && !seeks_logits<Rule>;
  static constexpr bool evicts_here = Rule::evicts && !shares_entries<Rule>;
  struct no_memory {};
  struct entry_memory : best_memory<threads> {
    of_warps<double, threads> sum;
  };
  using rule_memory =
      std::conditional_t<seeks_nearest<Rule>, best_memory<threads>,
                         std::conditional_t<shares_entries<Rule>, entry_memory, no_memory>>;
  struct shared_memory : rule_memory {
    combined_splits softmax;
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
    let_next_start();
    const index_t h = cache.head();
    const auto tile = static_cast<index_t>(block_index().y);
    const bool full = options.appended && cache.length[h] >= cache.capacity;
    const index_t n = cache.length[h] + (options.appended && !full ? 1 : 0);
    const head_context head = context_of(
        cache, state, h, options.appended ? cache.tokens_total[h] : cache.tokens_total[h] - 1);
    const slot_tile own = slot_tile::of(tile, from.tiles, full ? 0 : n);
    const index_t target = options.removes ? options.limits.of(h).target : 0;
    const auto& mine = under_target(rule, target);
    if (options.appended) {
      begin_slot(head, h, own, n - 1);
    }
    const protected_bits stay = look_ahead(mine, head, own);
    wait_for_previous();
    const auto ahead = first_logits(h, own.begin + thread_index(), own.end);
    if (Rule::observes || from.splits > 1) {
      combine_splits<Scalar, threads>{cache, from, out, log_sum_exp}(shared.softmax, h, tile, full);
    }
    if constexpr (!Rule::observes && !remembers<Rule>) {
      if (!options.appended) {
        return;
      }
    }
    best_two next;
    const candidate first = observe(shared, mine, head, h, own, stay, ahead, next);
    if constexpr (seeks_nearest<Rule>) {
      if (predicts() && from.tiles > 1) {
        best_of_block<threads>(shared, next,
                               [&](index_t i, candidate c) { from.lowest_of(h, tile)[i] = c; });
      }
    }
    const auto least = best_of_tiles(shared.ticket, shared.best, from.tickets + h, from.best_of(h),
                                     tile, from.tiles, first);
    if (least.last) {  // lengths change when all blocks of the head have read them
      finish(shared, mine, head, h, n, target, least.of == 0 ? -1 : least_slot(least.of), next);
    }
  }

 private:
  /// The new token's numbers, of which the first launch knows nothing.
  KVFOLD_DEVICE void begin_slot(const head_context& head, index_t h, const slot_tile& own,
                                index_t s) const {
    if (s < own.begin || s >= own.end || (s - own.begin) % threads != thread_index()) {
      return;
    }
    cache.log_mass[cache.slot(h, s)] = 0;
    cache.position[cache.slot(h, s)] = head.newest;
    KVFOLD_ROLLED
    for (index_t c = 0; c < state.count; ++c) {
      head.column(c, s) = state.initial[c];
    }
  }

  /// A bit for each of the thread's slots that is protected, which observing does not change: in
  /// this step, and in the next.
  struct protected_bits {
    unsigned now = 0, next = 0;
  };
  KVFOLD_DEVICE bool predicts() const { return from.predicted != nullptr; }

  /// The columns, which the first launch has pushed out of L2, are asked for.
  KVFOLD_DEVICE protected_bits look_ahead(const Rule& mine, const head_context& head,
                                          const slot_tile& own) const {
    protected_bits stay;
    unsigned bit = 1;
    head_context later = head;
    ++later.newest;
    for (index_t s = own.begin + thread_index(); s < own.end; s += threads, bit *= 2) {
      KVFOLD_ROLLED
      for (index_t c = 0; c < Rule::columns; ++c) {
        prefetch(&head.column(c, s));
      }
      if constexpr (evicts_here) {
        stay.now |= mine.is_protected(head, s) ? bit : 0U;
      }
      if constexpr (seeks_nearest<Rule>) {
        stay.next |= mine.is_protected(later, s) ? bit : 0U;
      }
    }
    return stay;
  }

  /// Of query heads 0 to 3.
  KVFOLD_DEVICE vector_16<float> first_logits(index_t h, index_t s, index_t end) const {
    vector_16<float> x{};
    if constexpr (by_probability) {
      if (s < end) {
        x = logits_of(h, s, 0);
      }
    }
    return x;
  }
  /// Only where the rule reads them: other calls have none.
  KVFOLD_DEVICE const float* logits_at(index_t h, index_t s) const {
    return from.logits + cache.slot(h, s) * cache.group;
  }
  KVFOLD_DEVICE vector_16<float> logits_of(index_t h, index_t s, index_t g) const {
    return load_row(logits_at(h, s), g, cache.group, cache.group % 4 == 0);
  }

  /// The block's slots: scores, and which slot would be evicted first, now and of those that the
  /// next step may evict. A slot's first logits, `ahead`, are on their way while the slot before is
  /// observed.
  KVFOLD_DEVICE candidate observe(shared_memory& shared, const Rule& mine, const head_context& head,
                                  index_t h, const slot_tile& own, protected_bits stay,
                                  vector_16<float> ahead, best_two& next) const {
    const auto probability = [&](index_t g, float l) {
      return exp2_approx((l - shared.softmax.max[g]) * log2_e) * shared.softmax.inverse[g];
    };
    candidate best = 0;
    KVFOLD_ROLLED
    for (index_t s = own.begin + thread_index(); s < own.end; s += threads) {
      if constexpr (shares_entries<Rule>) {
        mine.observe_entry(cache, state, h, s, logits_at(h, s), probability);
      } else if constexpr (seeks_logits<Rule>) {
        mine.observe_logits(head, s, logits_at(h, s), cache.group);
      } else if constexpr (by_probability) {
        const auto now = ahead;
        ahead = first_logits(h, s + threads, own.end);
        mine.observe(head, s, of_group(h, s, now, probability));
      }
      if constexpr (evicts_here) {
        const candidate c = least_candidate(mine.order(head, s), s);
        best = stay.now % 2 == 0 && c > best ? c : best;
        if constexpr (seeks_nearest<Rule>) {
          next.take(stay.next % 2 == 0 ? c : candidate{0});
        }
        stay.now /= 2, stay.next /= 2;
      }
    }
    return options.removes ? best : candidate{0};
  }
  /// A slot's probabilities as one number, four query heads at once.
  template <class Probability>
  KVFOLD_DEVICE float of_group(index_t h, index_t s, vector_16<float> l,
                               Probability probability) const {
    float a = 0;
    KVFOLD_ROLLED
    for (index_t g = 0; g < cache.group; g += 4) {
      if (g > 0) {
        l = logits_of(h, s, g);
      }
      KVFOLD_UNROLL
      for (index_t j = 0; j < 4; ++j) {
        if (g + j < cache.group) {
          a = kvfold::score::with_query_head(rule.combine, a, probability(g + j, l[j]));
        }
      }
    }
    return kvfold::score::of_group(rule.combine, a, cache.group);
  }

  /// One block, when all of the head is observed.
  KVFOLD_DEVICE void finish(shared_memory& shared, const Rule& mine, const head_context& head,
                            index_t h, index_t n, index_t target, index_t removed,
                            const best_two& next) const {
    const bool fresh = n > cache.length[h];  // else there was no room
    const bool over = options.removes && fresh && n == target + 1;
    bool removes = Rule::evicts && over && removed >= 0;
    if constexpr (remembers<Rule>) {
      if (fresh || !options.appended) {
        mine.template remember<threads>(
            cache, state, h, queries + std::ptrdiff_t{place_of_block()} * cache.group * cache.dim,
            head.newest);
      }
    }
    if (thread_index() == 0) {
      from.tickets[h] = 0;  // for a third launch
      if (fresh || !options.appended) {
        mine.observed(head);
      }
    }
    if constexpr (shares_entries<Rule>) {  // another launch removes a slot
      if (options.removes) {
        choose_entry(shared, mine, mine.tokens_of(cache, state, h, head.newest), h, n, over, fresh);
      }
      if (thread_index() == 0 && fresh) {
        count_slots(cache, h, n);
      }
      return;
    }
    if constexpr (seeks_nearest<Rule>) {
      if (options.removes) {
        const remove_predicted<Scalar, Rule, threads> removal{cache, state, from, mine, aligned};
        return removal(shared, head, h, n, removes ? removed : -1, fresh, next);
      }
    }
    if constexpr (merges_removed<Rule>) {
      if (removes) {
        removes = mine.merge_removed(shared.number, shared.best, cache, state, head, h, n, removed);
      }
    }
    if (removes && removed != n - 1) {
      move_slot<threads>(cache, state, head, h, removed, n - 1);
    }
    const index_t left = removes ? n - 1 : n;
    if constexpr (merges_removed<Rule>) {
      sync_block();
      if (options.removes && left <= target) {
        mine.after_compress(shared.number, shared.best, head, left);
      }
    }
    if (thread_index() == 0 && fresh) {
      count_slots(cache, h, left);
    }
  }

  /// The entry that the third launch removes, and what attention has found of it.
  template <class Tokens>
  KVFOLD_DEVICE void choose_entry(shared_memory& shared, const Rule& mine, const Tokens& tokens,
                                  index_t h, index_t n, bool over, bool fresh) const {
    best_two next;
    const index_t chosen =
        over ? mine.choose(shared.sum, shared.best, shared.number, tokens, n, next) : -1;
    const candidate found =
        predicts() && chosen >= 0 ? found_in_attention(from, h, n, chosen) : candidate{0};
    if (predicts() && fresh) {
      sync_block();  // all have looked it up
      next.leave_out(chosen);
      predict_slots(shared, from, h, n, chosen, next);
    }
    if (thread_index() == 0) {
      from.victims[h] = chosen, from.found[h] = found;
    }
  }
};

}  // namespace kvfold::cuda::detail
