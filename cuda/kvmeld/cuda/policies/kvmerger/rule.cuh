// SPDX-License-Identifier: MIT
/// KVMerger as the kernels know it.
#pragma once

#include "kvmeld/cuda/policies/evicting_rules.cuh"

namespace kvmeld::cuda {

/// KVMerger: sums as H2O's; runs of neighbours merge, several slots at once always. A plan selects
/// those that take no part: the last, and the sinks and the best of the others together.
struct kvmerger_rule : sum_rule {
  static constexpr bool merges = true, always_plans = true;
  float heavy = 0;  ///< of the target, at least the sinks
  bool by_threshold = false;
  float epsilon = 0.75F, sigma = 0;
  bool scale_values = false, gaps_break = true;
  index_t places = 0;  ///< of the best and the sinks, in a plan

  KVMELD_DEVICE void of_target(index_t target) {
    sum_rule::of_target(target);
    const index_t share = share_of(heavy, target);
    places = share > sinks ? share : sinks;
  }
  /// Sinks that are not among the last take places of the best.
  KVMELD_DEVICE bool counted(const head_context& head, index_t s) const {
    return is_protected(head, s) && !protection{0, latest, head.newest}(head.position[s]);
  }
  KVMELD_DEVICE void prepare(index_t taken) { places = places > taken ? places - taken : 0; }
  KVMELD_DEVICE index_t free(index_t, index_t) const { return places; }
};

}  // namespace kvmeld::cuda
