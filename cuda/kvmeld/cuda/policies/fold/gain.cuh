// SPDX-License-Identifier: MIT
/// fold: the log-mass of pins in heads that have more of them than their share.
#pragma once

#include "kvmeld/cuda/memory/head_context.cuh"
#include "kvmeld/cuda/policies/fold/pins.cuh"
#include "kvmeld/cuda/policies/fold/value_memory.cuh"

namespace kvmeld::cuda::detail {

/// `kvmeld::detail::fold_pins::log_gain` on a prompt's pins by score, but for sinks and the latest:
/// behind `fit_masses`, which lists the rows that are none. A block a head.
template <class Scalar>
struct raise_pins {
  static constexpr index_t threads = 512;
  struct shared_memory {
    of_warps<index_t, threads> number;
  };

  cache_view<Scalar> cache;
  plan_view plan;
  fold_rule rule;
  const index_t* more;  // [heads] −1: no pin is by score
  value_scratch of;

  /// Grid: heads.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), rows = plan.rows[h];
    if (rows < 0 || more[h] < 0) {
      return;
    }
    const float gain = rule.pins.log_gain(rows - of.unknowns[h], cache.next_position[h]);
    if (gain <= 0) {
      return;
    }
    const protection always{rule.pins.sinks, rule.pins.prompt_recent,
                            newest_of(shared.number, cache, h, cache.length[h])};
    const index_t* const begin = plan.begin + cache.bound(h, 0);
    for (index_t r = thread_index(); r < rows; r += threads) {
      const index_t s = plan.sources[cache.slot(h, begin[r])].source;
      float& log_mass = plan.log_mass[cache.slot(h, r)];
      if (of.place[cache.slot(h, r)] < 0 && !always(cache.position_of(h)[s])) {
        log_mass = log_mass > gain ? log_mass : gain;
      }
    }
  }
};

}  // namespace kvmeld::cuda::detail
