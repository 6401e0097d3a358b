// SPDX-License-Identifier: MIT
/// How seeds of clusters are chosen in rounds. For host and device, so without Eigen.
#pragma once

#include "kvmeld/config.hpp"

namespace kvmeld::inline v0 {
namespace search {

/// A round chooses its seeds among the `pool` slots that would gain most, at most half as many, so
/// that those that come next are there. Few seeds take several rounds too, of 32 at least.
struct seed_rounds {
  static constexpr index_t pool = 256;        ///< slots
  static constexpr index_t most_seeds = 128;  ///< seeds of a round

  /// Seeds of each round but the last, of `count` in all: a quarter, in steps of 32.
  KVMELD_HD static constexpr index_t quota(index_t count) {
    const index_t quarter = (count + most_seeds - 1) / most_seeds * (most_seeds / 4);
    return quarter < most_seeds ? quarter : most_seeds;
  }
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
