// SPDX-License-Identifier: MIT
/// The memory that planning and attention of one head work in.
#pragma once

#include <algorithm>  // std::max
#include <cstddef>    // std::size_t
#include <vector>

#include "kvmeld/memory/view.hpp"
#include "kvmeld/merge/plan.hpp"
#include "kvmeld/score/fused_similarity.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld {
inline namespace v0 {

/// Memory that one head at a time works in; holds nothing between calls. One per thread.
struct workspace {
  std::vector<float> attention;    ///< [group, capacity] probabilities of the last step
  std::vector<float> log_sum_exp;  ///< [group] of the last step
  std::vector<float> combined;     ///< [capacity] the group's attention as one number per slot
  std::vector<float> input;        ///< [group + 2, dim] a step's rows that came in 16 bits
  slot_scratch scratch;            ///< of planning
  merge_plan plan;                 ///< the last plan made
  fused_similarity comparison;     ///< what the last step's attention has compared

  void reserve(const head_ref& head) { reserve(head.group(), head.dim(), head.capacity()); }
  void reserve(index_t group, index_t dim, index_t capacity) {
    const auto g = static_cast<std::size_t>(group), n = static_cast<std::size_t>(capacity);
    attention.resize(std::max(attention.size(), g * n));
    log_sum_exp.resize(std::max(log_sum_exp.size(), g));
    combined.resize(std::max(combined.size(), n));
    input.resize(std::max(input.size(), (g + 2) * static_cast<std::size_t>(dim)));
    scratch.reserve(capacity), plan.reserve(capacity);
  }
};

}  // namespace v0
}  // namespace kvmeld
