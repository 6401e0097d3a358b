// SPDX-License-Identifier: MIT
/// fold: which slots keep their bytes.
#pragma once

#include "kvmeld/cuda/device/block_radix_select.cuh"
#include "kvmeld/cuda/memory/head_budgets.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/policies/fold/rule.cuh"

namespace kvmeld::cuda::detail {

/// What a prompt's scores pin, before leverage is asked.
struct scored_pins {
  index_t* pinned = nullptr;  ///< [heads, capacity] 1: it keeps its bytes
  index_t* more = nullptr;    ///< [heads] pins by leverage beside these; −1: none is by score
};

/// By scores: sinks, the latest, and the best by `prompt_score` of the slots of one token which the
/// prompt looked up. A prompt without any has its pins by leverage. A block a head.
template <class Scalar>
struct pin_scored {
  static constexpr index_t threads = 512, resident = 2;
  using shared_memory = selection_memory<threads>;

  cache_view<Scalar> cache;
  state_view state;
  fold_rule rule;
  head_budgets limits;
  bool decodes;
  scored_pins to;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), n = cache.length[h], target = limits.of(h).slots;
    if (!limits.of(h).reached(n) || n > cache.capacity) {
      return;
    }
    const head_context head = context_of(cache, state, h, newest_of(shared.number, cache, h, n));
    const auto score = [&](index_t s) { return head.column(fold_rule::prompt_score, s); };
    kvmeld::detail::fold_pins::of_decode pins{rule.pins.prompt_recent, rule.pins.scored(target), 0};
    bool any = decodes;
    if (decodes) {
      const fold_floats::positions prompt = rule.memory_of(head).scored();
      pins = rule.pins.decode(rule.slots_before_next(n, target), target, prompt.end - prompt.begin,
                              cache.next_position[h]);
    } else {
      for (index_t s = thread_index(); s < n; s += threads) {
        any = any || score(s) > 0;
      }
      any = block_max(shared.number, any ? index_t{1} : index_t{0}) > 0;
    }
    if (thread_index() == 0) {
      to.more[h] = any ? pins.others : -1;
    }
    if (!any) {
      return;
    }
    const protection always{rule.pins.sinks, pins.latest, head.newest};
    const auto candidate = [&](index_t s) {
      return !always(head.position[s]) && head.column(fold_rule::tokens, s) == 1.0F && score(s) > 0;
    };
    index_t* const pinned = to.pinned + head.first;
    const index_t candidates = block_total(shared.number, n, [&](index_t s) {
      const bool is = candidate(s);
      pinned[s] = is || always(head.position[s]) ? 1 : 0;
      return is;
    });
    block_radix_select<threads>::each_but_highest(
        shared.radix, shared.prefix, n, pins.scored < candidates ? pins.scored : candidates,
        candidate, [&](index_t s) { return ordered(score(s)); }, [&](index_t s) { pinned[s] = 0; });
  }
};

/// One launch where pins are by scores; `pinned [heads, capacity]` and `more [heads]` are scratch.
template <class Scalar>
scored_pins pin_by_scores(const fold_rule& rule, const cache_view<Scalar>& cache,
                          const state_view& state, const head_budgets& limits, bool decodes,
                          index_t* pinned, index_t* more, stream stream) {
  if (!rule.by_scores) {
    return {};
  }
  const scored_pins pins{pinned, more};
  launch(pin_scored<Scalar>{cache, state, rule, limits, decodes, pins}, {cache.blocks()}, stream);
  return pins;
}

/// Which slots keep their bytes in a plan of fold's: the protected, and of those that hold one
/// token the highest leverage above `least`, up to their share; or those that are pinned by score,
/// and of what came after the prompt the highest leverage. For `select`.
struct pin_rule {
  static constexpr bool evicts = true;
  fold_rule fold;
  const float* leverage;  // [heads, capacity]
  const float* least;     // [heads]; null: whatever it is
  bool decodes;
  scored_pins scored;
  index_t target = 0, latest = 0, most = 0;
  bool by_scores = false;
  fold_floats::positions prompt = {0, 0};  // by scores: leverage pins none of these

  KVMELD_DEVICE void of_target(index_t slots) { target = slots; }
  KVMELD_DEVICE void of_head(const head_context& head, index_t n) {
    by_scores = scored.more != nullptr && scored.more[head.head] >= 0;
    if (by_scores) {
      most = scored.more[head.head];
      prompt = fold.memory_of(head).scored();
      return;
    }
    if (decodes) {
      const auto pins = fold.pins.decode_by_leverage(fold.slots_before_next(n, target), target);
      latest = pins.latest, most = pins.others;
    } else {
      latest = fold.pins.recent_of(target), most = fold.pins.outliers(target);
    }
  }
  KVMELD_DEVICE bool is_protected(const head_context& head, index_t s) const {
    return by_scores ? scored.pinned[head.first + s] != 0
                     : protection{fold.pins.sinks, latest, head.newest}(head.position[s]);
  }
  KVMELD_DEVICE bool outlying(const head_context& head, index_t s) const {
    const index_t position = head.position[s];
    if (most == 0 || head.column(fold_rule::tokens, s) != 1.0F ||
        (prompt.begin <= position && position < prompt.end)) {
      return false;
    }
    const float x = leverage[head.first + s];
    return least == nullptr ? x == x : x > least[head.head];
  }
  KVMELD_DEVICE bool counted(const head_context& head, index_t s) const {
    return !is_protected(head, s) && outlying(head, s);
  }
  KVMELD_DEVICE void prepare(index_t candidates) { most = candidates < most ? candidates : most; }
  KVMELD_DEVICE index_t free(index_t, index_t) const { return most; }
  KVMELD_DEVICE unsigned order(const head_context& head, index_t s) const {
    return ordered(outlying(head, s) ? leverage[head.first + s] : lowest_score);
  }
};

}  // namespace kvmeld::cuda::detail
