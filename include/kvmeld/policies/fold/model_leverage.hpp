// SPDX-License-Identifier: MIT
/// fold's scores by how far a token stands out in all heads of a model, not in one alone.
#pragma once

#include <algorithm>  // std::max, std::min
#include <cmath>      // std::pow
#include <cstddef>    // std::size_t
#include <limits>     // std::numeric_limits
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
  index_t score, weight;  ///< columns of the state; a weight of 0: there is none

  /// `[heads][slots]` what scores are to be multiplied by, 1 where there is a weight. `head(i)`:
  /// `head_ref`, `state(i)`: `head_state` of all its slots, of head `i` of `heads`. Heads without
  /// the columns get no weights. Sums are in double. Takes two numbers for each token since the
  /// first without a weight, beside a head's leverage.
  std::vector<std::vector<float>> of(std::size_t heads, const auto& head, const auto& state) const {
    const auto has_none = [&](std::size_t i, index_t s) {
      return state(i).slot_stats() > weight && state(i).column(weight)[as_size(s)] == 0;
    };
    index_t begin = std::numeric_limits<index_t>::max(), end = 0;
    for (std::size_t i = 0; i < heads; ++i) {
      for (index_t s = 0; s < head(i).length(); ++s) {
        begin = has_none(i, s) ? std::min(begin, head(i).position(s)) : begin;
        end = std::max(end, head(i).position(s) + 1);
      }
    }
    const std::size_t tokens = begin < end ? as_size(end - begin) : 0;
    std::vector<double> sum(tokens);       // of the heads' leverages, each over its mean
    std::vector<index_t> holders(tokens);  // heads that have a slot for the token
    std::vector<float> scratch;
    for (std::size_t i = 0; i < heads && tokens > 0; ++i) {
      const head_ref& of_head = head(i);
      const index_t n = of_head.length();
      if (n == 0) {
        continue;
      }
      const auto leverage = score::leverage_of_keys(of_head, ridge, scratch);
      const float mean = Eigen::Map<const dense::vector>(leverage.data(), n).mean();
      for (index_t s = 0; s < n; ++s) {
        if (of_head.position(s) >= begin) {
          const auto t = as_size(of_head.position(s) - begin);
          sum[t] += mean > 0 ? double{leverage[as_size(s)] / mean} : 1.0;
          ++holders[t];
        }
      }
    }
    std::vector<std::vector<float>> weights(heads);
    for (std::size_t i = 0; i < heads && tokens > 0; ++i) {
      for (index_t s = 0; s < head(i).length() && state(i).slot_stats() > weight; ++s) {
        float w = 1;
        if (has_none(i, s)) {
          const auto t = as_size(head(i).position(s) - begin);
          const auto u = static_cast<float>(sum[t] / holders[t]);
          w = std::max(std::pow(u, exponent), least);
        }
        weights[i].push_back(w);
      }
    }
    return weights;
  }

  /// Keeps `weights [slots]` of slots that have none, and multiplies their scores.
  void keep(std::span<const float> weights, head_state& state) const {
    for (std::size_t s = 0; s < weights.size(); ++s) {
      if (float& kept = state.column(weight)[s]; kept == 0) {
        kept = weights[s], state.column(score)[s] *= kept;
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
