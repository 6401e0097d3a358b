// SPDX-License-Identifier: MIT
/// Which slots are protected, and how scores rank. For host and device.
#pragma once

#include <limits>  // std::numeric_limits

#include "kvmeld/config.hpp"

namespace kvmeld::inline v0 {

/// Tokens that are never evicted, by position: the first `sinks`, and the last `recent` up to
/// `newest`, which `protected_slots` fills in.
struct protection {
  index_t sinks = 0;
  index_t recent = 0;
  index_t newest = -1;

  KVMELD_HD bool operator()(index_t position) const {
    // Without a branch, so that compilers take many slots at once.
    return (static_cast<int>(position < sinks) | static_cast<int>(position > newest - recent)) != 0;
  }
};

/// A share of the budget, rounded to the nearest slot.
KVMELD_HD inline index_t share_of(float share, index_t target) {
  return static_cast<index_t>(share * static_cast<float>(target) + 0.5F);
}

/// Below every number.
inline constexpr float lowest_score = -std::numeric_limits<float>::infinity();

/// NaN ranks below every number.
KVMELD_HD inline float rank(float score) {
  if (score != score) {
    return lowest_score;
  }
  return score;
}

}  // namespace kvmeld::inline v0
