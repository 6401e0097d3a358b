// SPDX-License-Identifier: MIT
/// What a step makes of a share of a head's slots when attention has ended: scores, and which is
/// evicted first.
#pragma once

#include "kvmeld/cuda/memory/work_memory.cuh"
#include "kvmeld/cuda/score/combine_splits.cuh"
#include "kvmeld/cuda/score/rule.cuh"

namespace kvmeld::cuda::detail {

/// A thread has every `Threads`-th slot of `own`. It takes as long as its trips to memory that lie
/// one behind the other, so several slots are asked for at once. Reads 4 · group bytes of logits
/// and the columns that observing changes, and writes these.
template <class Scalar, class Rule, index_t Threads>
struct observe_slots {
  static constexpr bool evicts_one = Rule::evicts && !always_plans<Rule>;
  static constexpr bool by_slots = Rule::observes && !shares_entries<Rule>;  // each by itself
  static constexpr index_t columns = by_slots ? observed_columns<Rule>() : 0;
  static_assert(
      columns <= Rule::columns && (!by_slots || columns > 0),
      "kvmeld::cuda: expected a rule that observes with 1 to `columns` `observed_columns`");
  /// Slots that a thread asks for at once: what its registers hold, 64 of a block of 512.
  static constexpr index_t at_once = !by_slots && !evicts_one ? 1
                                     : Threads <= 128         ? 4
                                     : merges_removed<Rule>   ? 2
                                                              : 4;
  static constexpr index_t outputs_at_once = shares_entries<Rule> ? 2 : 4;  // of splits: likewise
  /// Of the slots that a thread has asked for.
  struct numbers {
    float column[at_once][columns > 0 ? columns : 1];
    vector_16<float> logits[by_slots ? at_once : 1];  // of four query heads
    float log_mass[seeks_logits<Rule> ? at_once : 1];
  };

  const cache_view<Scalar>& cache;
  const state_view& state;
  const partial_attention& from;
  const Rule& rule;
  const head_context& head;
  slot_tile own;

  KVMELD_DEVICE index_t first() const { return own.begin + thread_index(); }

  /// A bit for each of the thread's slots that is protected, which observing does not change. The
  /// columns, which attention pushes out of L2, are asked for.
  KVMELD_DEVICE unsigned look_ahead() const {
    unsigned stay = 0, bit = 1;
    for (index_t s = first(); s < own.end; s += Threads, bit *= 2) {
      KVMELD_ROLLED
      for (index_t c = 0; c < Rule::columns; ++c) {
        prefetch(&head.column(c, s));
      }
      if constexpr (evicts_one) {
        stay |= rule.is_protected(head, s) ? bit : 0U;
      }
    }
    return stay;
  }

  /// Of the thread's slots from `s` on, what attention does not write.
  KVMELD_DEVICE void ask(numbers& to, index_t s) const {
    KVMELD_UNROLL
    for (index_t u = 0; u < at_once; ++u, s += Threads) {
      KVMELD_UNROLL
      for (index_t c = 0; c < columns; ++c) {
        to.column[u][c] = s < own.end ? head.column(c, s) : 0.0F;
      }
      if constexpr (seeks_logits<Rule>) {
        to.log_mass[u] = s < own.end ? head.log_mass[s] : 0.0F;
      }
    }
  }
  /// ... logits of query heads `g` to `g + 3`. One branch for all slots: what two ways may have
  /// loaded is waited for where they meet.
  KVMELD_DEVICE void ask_logits(numbers& to, index_t s, index_t g) const {
    if constexpr (by_slots) {
      if (cache.group % 4 == 0) {
        KVMELD_UNROLL
        for (index_t u = 0; u < at_once; ++u) {
          if (s + u * Threads < own.end) {
            to.logits[u] = load_16(logits_of(s + u * Threads) + g);
          }
        }
      } else {
        unrolled<at_once, 4>([&](index_t u, index_t j) {
          if (g + j < cache.group && s + u * Threads < own.end) {
            to.logits[u][j] = logits_of(s + u * Threads)[g + j];
          }
        });
      }
    }
  }

  /// The first candidate to be evicted, 0: none. `held`: of the thread's first slots, logits too.
  template <class Softmax>
  KVMELD_DEVICE candidate operator()(Softmax& softmax, unsigned stay, numbers& held) const {
    candidate best = 0;
    KVMELD_ROLLED
    for (index_t s = first(); s < own.end; s += at_once * Threads) {
      if (s != first()) {
        ask(held, s);
        ask_logits(held, s, 0);
      }
      float a[at_once] = {};
      if constexpr (by_slots) {
        combine_groups(softmax, held, s, a);
      }
      KVMELD_UNROLL
      for (index_t u = 0; u < at_once; ++u) {
        const index_t slot = s + u * Threads;
        if (slot < own.end) {
          const unsigned order = observe(softmax, held, slot, u, a[u]);
          if constexpr (evicts_one) {
            const candidate c = least_candidate(order, slot);
            best = stay % 2 == 0 && c > best ? c : best;
          }
        }
        stay /= 2;
      }
    }
    return best;
  }

 private:
  /// Only where the rule reads them: other calls have none.
  KVMELD_DEVICE const float* logits_of(index_t s) const { return from.logits_of(cache, s); }
  template <class Softmax>
  KVMELD_DEVICE static float probability(Softmax& softmax, index_t g, float l) {
    return exp2_approx((l - softmax.max(g)) * log2_e) * softmax.inverse(g);
  }

  /// Each slot's probabilities, or the exp of its logits, as one number, four query heads at once.
  template <class Softmax>
  KVMELD_DEVICE void combine_groups(Softmax& softmax, numbers& held, index_t s,
                                    float (&a)[at_once]) const {
    [[maybe_unused]] float most[at_once];
    KVMELD_UNROLL
    for (index_t u = 0; u < at_once; ++u) {
      a[u] = 0, most[u] = lowest_score;
    }
    KVMELD_ROLLED
    for (index_t g = 0; g < cache.group; g += 4) {
      if (g > 0) {
        ask_logits(held, s, g);
      }
      KVMELD_UNROLL
      for (index_t u = 0; u < at_once; ++u) {
        if constexpr (seeks_logits<Rule>) {
          add_exponentials(held.logits[u], cache.group - g, most[u], a[u]);
        } else {
          KVMELD_UNROLL
          for (index_t j = 0; j < 4; ++j) {
            if (g + j < cache.group) {
              a[u] = kvmeld::score::with_query_head(rule.combine, a[u],
                                                    probability(softmax, g + j, held.logits[u][j]));
            }
          }
        }
      }
    }
    KVMELD_UNROLL
    for (index_t u = 0; u < at_once; ++u) {
      if constexpr (seeks_logits<Rule>) {
        const float none = most[u] - most[u];  // no number where that is infinite, as on the CPU
        a[u] = none == 0 ? most[u] + logarithm(a[u] / static_cast<float>(cache.group)) : none;
      } else {
        a[u] = kvmeld::score::of_group(rule.combine, a[u], cache.group);
      }
    }
  }
  /// KeepKV's ln mean_g exp(ℓ_g): Σ exp(x − most) of `count` and more numbers, with a higher `most`
  /// where there is one.
  KVMELD_DEVICE static void add_exponentials(const vector_16<float>& x, index_t count, float& most,
                                             float& sum) {
    float top = most;
    KVMELD_UNROLL
    for (index_t j = 0; j < 4; ++j) {
      top = j < count ? higher_of(top, x[j]) : top;
    }
    sum *= softmax_weight(most, top), most = top;
    KVMELD_UNROLL
    for (index_t j = 0; j < 4; ++j) {
      sum += j < count ? softmax_weight(x[j], top) : 0.0F;
    }
  }

  /// Slot `s`, the `u`-th that is held. Its order then.
  template <class Softmax>
  KVMELD_DEVICE unsigned observe(Softmax& softmax, const numbers& held, index_t s, index_t u,
                                 float a) const {
    if constexpr (shares_entries<Rule>) {
      rule.observe_entry(cache, state, head.head, s, logits_of(s),
                         [&](index_t g, float l) { return probability(softmax, g, l); });
      return 0;
    } else if constexpr (!by_slots) {
      return rule.order(head, s);
    } else {
      float column[columns];
      KVMELD_UNROLL
      for (index_t c = 0; c < columns; ++c) {
        column[c] = held.column[u][c];
      }
      float score = 0;
      if constexpr (seeks_logits<Rule>) {
        score = rule.observe_logits(held.log_mass[u], column, a);
      } else {
        score = rule.observe(head, column, a);
      }
      KVMELD_UNROLL
      for (index_t c = 0; c < columns; ++c) {
        if (!(column[c] == held.column[u][c])) {
          head.column(c, s) = column[c];
        }
      }
      return ordered(score);
    }
  }
};

}  // namespace kvmeld::cuda::detail
