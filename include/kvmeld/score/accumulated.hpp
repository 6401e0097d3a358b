// SPDX-License-Identifier: MIT
/// How attention enters a score: scalars in, a scalar out. For host and device.
#pragma once

#include "kvmeld/config.hpp"

namespace kvmeld {
inline namespace v0 {

/// How the attention of a group's query heads becomes one number per slot.
enum class group_combine { sum, mean, max };

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

}  // namespace score
}  // namespace v0
}  // namespace kvmeld
