/// How attention enters a score: scalars in, a scalar out. For host and device.
#pragma once

#include "kvfold/config.hpp"

namespace kvfold::inline v0 {

/// How the attention of a group's query heads becomes one number per slot.
enum class group_combine { sum, mean, max };

/// `s_j ← λ s_j + a_j`; λ = 1: cumulative attention.
KVFOLD_HD inline float accumulated(float score, float attention, float decay) {
  return decay * score + attention;
}

}  // namespace kvfold::inline v0
