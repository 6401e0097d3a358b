/// KVMerger as the kernels know it.
#pragma once

#include "kvfold/cuda/policies/evicting_rules.cuh"

namespace kvfold::cuda {

/// KVMerger: sums as H2O's; runs of neighbours merge, several slots at once always. A plan selects
/// those that take no part: the last, and the sinks and the best of the others together.
struct kvmerger_rule : sum_rule {
  static constexpr bool merges = true, always_plans = true;
  index_t heavy = 4;
  bool by_threshold = false;
  float epsilon = 0.75F, sigma = 0;
  bool scale_values = true, gaps_break = true;

  /// Sinks that are not among the last take places of the best.
  KVFOLD_DEVICE bool counted(const head_context& head, index_t s) const {
    return is_protected(head, s) && !search::protection{0, recent, head.newest}(head.position[s]);
  }
  KVFOLD_DEVICE void prepare(index_t taken) { heavy = heavy > taken ? heavy - taken : 0; }
  KVFOLD_DEVICE index_t free(index_t, index_t) const { return heavy; }
};

}  // namespace kvfold::cuda
