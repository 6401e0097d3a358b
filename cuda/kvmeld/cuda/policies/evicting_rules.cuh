// SPDX-License-Identifier: MIT
/// Rules of policies that let slots go.
#pragma once

#include "kvmeld/cuda/score/rule.cuh"

namespace kvmeld::cuda {

/// StreamingLLM: the oldest but the sinks.
struct position_rule : no_rule {
  static constexpr bool evicts = true;
  index_t sinks = 4;

  KVMELD_DEVICE bool is_protected(const head_context& head, index_t s) const {
    return head.position[s] < sinks;
  }
  KVMELD_DEVICE unsigned order(const head_context& head, index_t s) const {
    return ordered(head.position[s]);
  }
};

/// `s ← decay · s + a` (H2O: decay 1, TOVA: 0), or `s ← max(s, a)`, in column 0.
struct sum_rule {
  static constexpr index_t columns = 1, observed_columns = 1;
  static constexpr bool observes = true, evicts = true, merges = false;
  group_combine combine = group_combine::sum;
  index_t sinks = 4;
  float recent = 0;  ///< of the target
  float decay = 1;
  bool max = false;
  index_t latest = 0;  ///< that share, in tokens

  KVMELD_DEVICE void of_target(index_t target) { latest = share_of(recent, target); }

  KVMELD_DEVICE float observe(const head_context&, float* column, float a) const {
    float& score = column[0];
    return score = max ? (score < a ? a : score) : score::accumulated(score, a, decay);
  }
  KVMELD_DEVICE void observed(const head_context&) const {}
  KVMELD_DEVICE bool is_protected(const head_context& head, index_t s) const {
    return protection{sinks, latest, head.newest}(head.position[s]);
  }
  KVMELD_DEVICE unsigned order(const head_context& head, index_t s) const {
    return ordered(head.column(0, s));
  }
};

/// SnapKV: over the last `window` to 2 `window` queries, as a past and a current sum.
struct window_rule {
  static constexpr index_t columns = 2, observed_columns = 2;
  static constexpr bool observes = true, evicts = true, merges = false;
  enum column_name : index_t { past, current };
  group_combine combine = group_combine::sum;
  index_t sinks = 4, window = 32;

  /// Floats of the state's memory, a head.
  static std::size_t memory(index_t, index_t, index_t) { return 1; }
  KVMELD_DEVICE bool full(const head_context& head) const {
    return head.memory[0] + 1 >= static_cast<float>(window);
  }
  KVMELD_DEVICE float observe(const head_context& head, float* column, float a) const {
    const float sum = score::accumulated(column[current], a, 1.0F);
    const bool is_full = full(head);
    column[past] = is_full ? sum : column[past], column[current] = is_full ? 0.0F : sum;
    return column[past] + column[current];
  }
  /// By one thread, when all slots have been.
  KVMELD_DEVICE void observed(const head_context& head) const {
    head.memory[0] = full(head) ? 0.0F : head.memory[0] + 1;
  }
  KVMELD_DEVICE bool is_protected(const head_context& head, index_t s) const {
    return protection{sinks, window, head.newest}(head.position[s]);
  }
  KVMELD_DEVICE unsigned order(const head_context& head, index_t s) const {
    return ordered(head.column(past, s) + head.column(current, s));
  }
};

}  // namespace kvmeld::cuda
