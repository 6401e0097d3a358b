// SPDX-License-Identifier: MIT
/// One decode step's attention, as policies observe it.
#pragma once

#include <algorithm>  // std::copy_n
#include <span>

#include "kvmeld/score/accumulated.hpp"
#include "kvmeld/score/queries.hpp"

namespace kvmeld {
inline namespace v0 {

/// What is known of a step after the newest token was appended and attended. An engine with its own
/// attention fills in what it has; a policy that needs more refuses.
struct observation {
  std::span<const float> probabilities;     ///< [group, length]
  std::span<const float> log_sum_exp = {};  ///< [group] of the logits; empty: not known
  const float* query = nullptr;             ///< [group, dim] rotated, the newest's; null: not known
  std::span<const float> attention = {};    ///< [length] the group combined; `observe` fills it in
};

namespace score {

/// The group's probabilities as one number per slot, into `combined [length]`.
inline std::span<const float> combine_group(std::span<const float> probabilities, index_t group,
                                            group_combine how, std::span<float> combined) {
  const std::size_t n = combined.size();
  std::copy_n(probabilities.begin(), n, combined.begin());
  for (std::size_t g = 1; g < static_cast<std::size_t>(group); ++g) {
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
}  // namespace v0
}  // namespace kvmeld
