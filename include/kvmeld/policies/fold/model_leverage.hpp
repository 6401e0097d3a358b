// SPDX-License-Identifier: MIT
/// fold's scores by how far a token stands out in all heads of a model, not in one alone.
#pragma once

#include <algorithm>  // std::max
#include <cmath>      // std::pow
#include <cstddef>    // std::size_t
#include <span>
#include <vector>

#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/score/leverage.hpp"

namespace kvmeld::inline v0::detail {

/// Over the heads h of a model that share slots, and their tokens t:
///
///     u_t = mean_h( lev_h,t / mean_s lev_h,s )       over the heads that have a slot for t
///     w_t = u_t^exponent,    score_h,t *= w_t
///
/// A head whose keys are all alike counts as 1. Slots that have a weight already, those of an
/// earlier prompt, keep it and their scores, so that weighing twice is weighing once.
struct leverage_weights {
  float exponent, ridge;

  /// `head(i)`: `head_ref`, `state(i)`: `head_state` of all its slots, of head `i` of `heads`;
  /// `score` and `weight`: the state's columns that are changed, a weight being 0 where there is
  /// none. Heads without such a column keep their scores. Sums are in double, so that the order of
  /// heads does not show. One number for each position beside a head's leverage.
  void apply(std::size_t heads, const auto& head, const auto& state, index_t score,
             index_t weight) const {
    std::vector<double> sum;       // [positions] of the heads' leverages, each over its mean
    std::vector<index_t> holders;  // [positions] heads that have a slot for the token
    std::vector<float> scratch;
    for (std::size_t i = 0; i < heads; ++i) {
      const head_ref& of_head = head(i);
      const index_t n = of_head.length();
      if (n == 0) {
        continue;
      }
      sum.resize(std::max(sum.size(), as_size(of_head.next_position())));
      holders.resize(sum.size());
      const auto leverage = score::leverage_of_keys(of_head, ridge, scratch);
      const float mean = Eigen::Map<const dense::vector>(leverage.data(), n).mean();
      for (index_t s = 0; s < n; ++s) {
        const auto t = as_size(of_head.position(s));
        sum[t] += mean > 0 ? double{leverage[as_size(s)] / mean} : 1.0;
        ++holders[t];
      }
    }
    for (std::size_t i = 0; i < heads; ++i) {
      const head_ref& of_head = head(i);
      if (state(i).slot_stats() <= weight) {
        continue;
      }
      const auto scores = state(i).column(score), weights = state(i).column(weight);
      for (index_t s = 0; s < of_head.length(); ++s) {
        const auto at = as_size(s), t = as_size(of_head.position(s));
        if (weights[at] == 0) {
          const auto u = static_cast<float>(sum[t] / holders[t]);
          weights[at] = std::max(std::pow(u, exponent), least);
          scores[at] *= weights[at];
        }
      }
    }
  }

  /// Weighs new `scores` of slots by the weights that they have.
  static void again(std::span<const float> weights, std::span<float> scores) {
    for (std::size_t s = 0; s < scores.size(); ++s) {
      scores[s] *= weights[s] > 0 ? weights[s] : 1.0F;
    }
  }

 private:
  static constexpr float least = 1e-30F;  // of a weight: 0 says that there is none
};

}  // namespace kvmeld::inline v0::detail
