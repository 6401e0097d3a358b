// SPDX-License-Identifier: MIT
/// KeepKV's slots of least weight: now, and before attention those that will have it.
#pragma once

#include <algorithm>  // std::min
#include <cmath>      // std::abs, std::log
#include <limits>     // std::numeric_limits
#include <span>

#include "kvmeld/policies/keepkv/estimate.hpp"
#include "kvmeld/search/select.hpp"

namespace kvmeld::inline v0 {
namespace detail {

/// Slot ↦ ln w = β + S; an S that is no number is far below all others. Without branches, so that
/// compilers take many.
auto log_weights(const kv_head auto& head, std::span<const float> log_score) {
  return [votes = &head.log_mass(0), s = log_score.data()](index_t i) {
    return votes[i] + (std::abs(s[i]) <= std::numeric_limits<float>::max() ? s[i] : -1e30F);
  };
}

/// Mostly the slot, not protected, of least weight once S has taken in `query [group, dim]`: that
/// of the slots that were lowest in their parts of the head. No S falls below what s_now = 0 would
/// make it.
template <class Protected>
index_t lowest_after(const kv_head auto& head, Protected is_protected,
                     std::span<const float> log_score, std::span<const float> weight_sum,
                     moving_average average, const float* query) {
  const auto few = search::lowest_apart(head.length(), is_protected, log_weights(head, log_score));
  index_t least = few.lowest();
  float lowest = std::numeric_limits<float>::infinity();
  const auto compare = [&](index_t slot, float before) {
    float s = log_score[as_size(slot)], w = weight_sum[as_size(slot)];
    const float old = average.decay * w;
    if (before + std::log(old / (old + 1)) < lowest) {
      average(s, w, log_score_of(head, query, slot));
      const float after = head.log_mass(slot) + s;
      least = after < lowest ? slot : least;
      lowest = std::min(after, lowest);
    }
  };
  if (least < 0) {
    return least;
  }
  compare(least, -std::numeric_limits<float>::infinity());  // mostly it leaves few to compare
  for (index_t i = 0; i < few.parts; ++i) {
    if (few.slot[i] >= 0) {
      compare(few.slot[i], few.score[i]);
    }
  }
  return least;
}

}  // namespace detail
}  // namespace kvmeld::inline v0
