/// What is written once for the host and the device: scalars in, a scalar out.
#pragma once

#include <cmath>   // std::fma
#include <limits>  // std::numeric_limits

#include "kvfold/config.hpp"

namespace kvfold {

/// What becomes of a column's numbers when slots are merged.
enum class column_merge { sum, max, anchor };

/// How the attention of a group's query heads becomes one number per slot.
enum class group_combine { sum, mean, max };

namespace detail {

/// `a · b + c`, rounded once on a processor that can, and twice on one that cannot. Left to the
/// compiler, one copy of a function may round otherwise than another. A device has its own.
inline float multiply_add(float a, float b, float c) {
#ifdef FP_FAST_FMAF
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

/// `a` of the row's anchor and `b` of another source as one.
KVFOLD_HD inline float merged_column(column_merge fold, float a, float b) {
  return fold == column_merge::sum ? a + b : fold == column_merge::max ? (a < b ? b : a) : a;
}

}  // namespace detail

/// Tokens that never leave, by position: the first `sinks`, and the last `recent` up to `newest`.
struct protection {
  index_t sinks = 0;
  index_t recent = 0;
  index_t newest = -1;

  KVFOLD_HD bool operator()(index_t position) const {
    // Without a branch: many slots at once are asked.
    return (static_cast<int>(position < sinks) | static_cast<int>(position > newest - recent)) != 0;
  }
};

/// A share of the budget, rounded to the nearest slot.
KVFOLD_HD inline index_t share_of(float share, index_t target) {
  return static_cast<index_t>(share * static_cast<float>(target) + 0.5F);
}

/// Below every number.
inline constexpr float lowest_score = -std::numeric_limits<float>::infinity();

/// NaN ranks below every number.
KVFOLD_HD inline float rank(float score) {
  if (score != score) {
    return lowest_score;
  }
  return score;
}

/// `s_j ← λ s_j + a_j`; λ = 1: cumulative attention.
KVFOLD_HD inline float accumulated(float score, float attention, float decay) {
  return decay * score + attention;
}

}  // namespace kvfold
