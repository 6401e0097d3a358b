// SPDX-License-Identifier: MIT
/// What host and device choose alike: which slots are protected, how scores rank, and how seeds of
/// clusters are chosen in rounds. Without Eigen.
#pragma once

#include <limits>  // std::numeric_limits

#include "kvmeld/config.hpp"

namespace kvmeld::inline v0 {

/// Tokens that are never evicted, by position: the first `sinks`, and the last `recent` up to
/// `newest`, which `protected_slots` fills in.
struct protection {
  index_t sinks = 0;    ///< first tokens
  index_t recent = 0;   ///< latest tokens
  index_t newest = -1;  ///< the latest position

  /// Is the token at `position` protected?
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

namespace search {

/// A round chooses its seeds among the `pool` slots that would gain most, at most half as many, so
/// that the next ones are there. Few seeds take several rounds too, of 32 at least.
struct seed_rounds {
  static constexpr index_t pool = 256;        ///< slots
  static constexpr index_t most_seeds = 128;  ///< seeds of a round

  /// Seeds of each round but the last, of `count` in all: a quarter, in steps of 32.
  KVMELD_HD static constexpr index_t quota(index_t count) {
    const index_t quarter = (count + most_seeds - 1) / most_seeds * (most_seeds / 4);
    return quarter < most_seeds ? quarter : most_seeds;
  }
  /// Rounds that `count` seeds take.
  KVMELD_HD static constexpr index_t rounds(index_t count) {
    return count > 0 ? (count + quota(count) - 1) / quota(count) : 0;
  }
  /// The most of any number of seeds up to `count`.
  KVMELD_HD static constexpr index_t most_rounds(index_t count) {
    const index_t steps = (count + most_seeds / 4 - 1) / (most_seeds / 4),
                  full = (count + most_seeds - 1) / most_seeds;
    return steps < 4 ? steps : full > 4 ? full : 4;
  }

  /// Within a round gains are compared as half, times this: `largest` of the pool becomes 2¹⁴.
  KVMELD_HD static constexpr float scale(float largest) {
    return largest > 1e-30F ? 16384.0F / largest : 1.0F;
  }
  static constexpr float most_scaled = 60000;  ///< a larger gain counts as this
};

}  // namespace search
}  // namespace kvmeld::inline v0
