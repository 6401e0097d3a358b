// SPDX-License-Identifier: MIT
/// What fold frees, keeps, and remembers of a head, for host and device.
#pragma once

#include <cmath>    // std::log
#include <cstddef>  // std::ptrdiff_t

#include "kvmeld/memory/fields.hpp"
#include "kvmeld/search/rules.hpp"

namespace kvmeld::inline v0 {
namespace detail {

/// fold: slots that one plan of a step frees.
KVMELD_HD inline index_t fold_freed(index_t period, index_t slots) {
  return period > 0 ? period : slots / 16 > 1 ? slots / 16 : 1;
}
/// fold: how many of a head's slots are pinned, so keep their bytes.
struct fold_pins {
  index_t sinks = 4, recent = 24;
  float recent_share = 0.25F, share = 0.5F;
  index_t clusters = 0, prompt_recent = 8;
  float score_share = 0.7F;
  float gain = 0;
  index_t mean = 0;

  /// By leverage: the latest tokens.
  KVMELD_HD index_t recent_of(index_t slots) const {
    return least(share_of(recent_share, slots), recent);
  }
  /// By leverage: outliers at most.
  KVMELD_HD index_t outliers(index_t slots) const {
    return most(0,
                static_cast<index_t>(share * static_cast<float>(slots - sinks - recent_of(slots))));
  }
  /// By scores: those of a prompt in addition to sinks and the latest.
  KVMELD_HD index_t scored(index_t slots) const {
    const index_t free = most(0, slots - sinks - prompt_recent);
    const index_t merged = clusters > 0 ? clusters : share_of(1 - score_share, free);
    return most(0, free - most(1, merged));
  }
  /// By scores: the log-mass of pins after a prompt of so many `tokens`, where `pinned` slots of
  /// the head keep their bytes: γ c max(0, ln(P / M)), P being `pinned`, M `mean`, N `tokens` and
  ///     c = min(2, 0.1 N / M)               where M is below a tenth of N: few heads retrieve
  ///     c = max(0, (0.3 − M / N) / 0.2)     elsewhere
  /// With three tenths of the tokens heads of few pins retrieve by themselves. At most 43, as no
  /// head has more than 2³¹ slots.
  KVMELD_HD float log_gain(index_t pinned, index_t tokens) const {
    if (mean <= 0 || pinned <= mean) {
      return 0;
    }
    const float slots = static_cast<float>(mean), kept = slots / static_cast<float>(tokens);
    const float c = kept < 0.05F  ? 2
                    : kept < 0.1F ? 0.1F / kept
                    : kept < 0.3F ? (0.3F - kept) / 0.2F
                                  : 0;
    return gain * c * std::log(static_cast<float>(pinned) / slots);
  }
  /// A plan of decode: how many slots keep their bytes. `slots`: the most that the head holds
  /// between two plans. `target`: those that it has after this one. At least one slot of the target
  /// is left for all that is merged.
  struct of_decode {
    index_t latest, scored, others;
  };
  /// By leverage. `slots` may be many times the target: a quarter of the slots that a prompt's plan
  /// would merge into are left at least.
  KVMELD_HD of_decode decode_by_leverage(index_t slots, index_t target) const {
    const index_t merged = most(1, (target - sinks - recent_of(target) - outliers(target)) / 4);
    const index_t latest = least(recent_of(slots), most(0, target - sinks - merged));
    return {latest, 0, most(0, least(outliers(slots), target - sinks - latest - merged))};
  }
  /// By scores that decode goes on with: the latest, among them `unscored` tokens, and the best of
  /// all that was scored; what is merged has as many slots as after a prompt.
  KVMELD_HD of_decode decode_by_scores(index_t target, index_t unscored) const {
    const index_t latest = least(prompt_recent + unscored, most(0, target - sinks - 2));
    return {latest, most(0, least(scored(target) - unscored, target - sinks - latest - 2)), 0};
  }
  /// By scores of the prompt alone: the latest are so many that a quarter of the slots for all that
  /// is merged is left; what was scored and all else have pins by their lengths.
  KVMELD_HD of_decode decode(index_t slots, index_t target, index_t scored_tokens,
                             index_t all_tokens) const {
    const index_t merged = slots - sinks - prompt_recent - scored(slots);
    const index_t wanted =
        least(clusters > 0 ? recent : recent_of(slots), prompt_recent + 3 * merged / 4);
    const index_t latest = least(wanted, most(0, target - sinks - 2));
    const index_t all = most(0, least(scored(slots), target - sinks - latest - 2));
    const index_t of_scored =
        share_of(static_cast<float>(scored_tokens) / static_cast<float>(all_tokens), all);
    return {latest, of_scored, all - of_scored};
  }

 private:
  KVMELD_HD static index_t least(index_t a, index_t b) { return a < b ? a : b; }
  KVMELD_HD static index_t most(index_t a, index_t b) { return a > b ? a : b; }
};

/// What fold remembers of a head: queries of some steps, in bfloat16, which has float's range.
struct fold_layout {
  index_t queries, group, dim;
  bool scores = false;  ///< in decode: so each query has the log-sum-exp of its step
  memory_layout all = {};
  integer_field prompt_begin = all.i32(), prompt_end = all.i32(), held = all.i32(),
                newest = all.i32(), next = all.i32(), steps = all.i32(),
                position = all.i32(queries);
  row_field query = all.b16(dim, std::ptrdiff_t{queries} * group);
  integer_field unscored = all.i32(scores ? 1 : 0);
  row_field log_sum = all.f32(1, scores ? std::ptrdiff_t{queries} * group : 0);

  /// Query `i` in order of age lies in this slot, `held_now` of them being there.
  KVMELD_HD index_t slot_of(index_t i, index_t held_now, index_t newest_slot) const {
    return held_now < queries ? i : (newest_slot + 1 + i) % queries;
  }
  /// The slot after one that a step's query was written to: every `stride`-th query is held.
  KVMELD_HD index_t next_slot(index_t slot, index_t step, index_t stride) const {
    return step % stride == 0 ? (slot + 1) % queries : slot;
  }
};

}  // namespace detail
}  // namespace kvmeld::inline v0
