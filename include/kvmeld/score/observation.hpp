// SPDX-License-Identifier: MIT
/// One decode step's attention, as policies observe it, and how it enters a score. For host and
/// device.
#pragma once

#include <algorithm>  // std::copy_n
#include <span>

#include "kvmeld/config.hpp"

namespace kvmeld::inline v0 {

/// How the attention of a group's query heads becomes one number per slot.
enum class group_combine { sum, mean, max };

/// What is known of a step after the newest token was appended and attended. An engine with its own
/// attention fills in what it has; a policy that needs more refuses.
struct observation {
  std::span<const float> probabilities;     ///< [group, length]
  std::span<const float> log_sum_exp = {};  ///< [group] of the logits; empty: not known
  const float* query = nullptr;             ///< [group, dim] rotated, the newest's; null: not known
  std::span<const float> attention = {};    ///< [length] the group combined; `observe` fills it in
};

namespace score {

/// The group's number `a` of the query heads so far, with that of one more.
KVMELD_HD inline float with_query_head(group_combine how, float a, float p) {
  return how == group_combine::max ? (a < p ? p : a) : a + p;
}
/// ... of all `group`.
KVMELD_HD inline float of_group(group_combine how, float a, index_t group) {
  return how == group_combine::mean ? a / static_cast<float>(group) : a;
}

/// `s_j ← λ s_j + a_j`; λ = 1: cumulative attention.
KVMELD_HD inline float accumulated(float score, float attention, float decay) {
  return decay * score + attention;
}

/// The group's probabilities as one number per slot, into `combined [length]`.
inline std::span<const float> combine_group(std::span<const float> probabilities, index_t group,
                                            group_combine how, std::span<float> combined) {
  const std::size_t n = combined.size();
  std::copy_n(probabilities.begin(), n, combined.begin());
  for (std::size_t g = 1; g < as_size(group); ++g) {
    for (std::size_t s = 0; s < n; ++s) {
      const float a = probabilities[g * n + s];
      combined[s] = with_query_head(how, combined[s], a);
    }
  }
  if (how == group_combine::mean) {
    for (float& a : combined) {
      a /= static_cast<float>(group);
    }
  }
  return combined;
}

}  // namespace score
}  // namespace kvmeld::inline v0
