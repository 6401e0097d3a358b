// SPDX-License-Identifier: MIT
/// The baseline of baselines: nothing is evicted, and the budget does not matter.
#pragma once

#include "kvmeld/policies/policy.hpp"

namespace kvmeld::inline v0 {

/// Keeps every slot: no compression, whatever the budget.
struct full_cache {
  static constexpr std::string_view name() { return "full_cache"; }
  static constexpr attention_support supports() { return {}; }
  static constexpr bool evicts() { return false; }

  void plan(const kv_head auto& head, const head_state&, index_t, slot_scratch&,
            merge_plan& out) const {
    keep_all(head, out);
  }
};

}  // namespace kvmeld::inline v0
