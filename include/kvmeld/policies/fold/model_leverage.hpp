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
#include "kvmeld/memory/view.hpp"

namespace kvmeld::inline v0::detail {

/// Over the heads h of a model that share slots, and their tokens t:
///
///     u_t = mean_h( lev_h,t / mean_s lev_h,s )       over the heads that measured a slot for t
///     w_t = u_t^exponent,    score_h,t *= w_t
///
/// A head whose keys are all alike counts as 1. A slot is weighed once: a later prompt's scores of
/// it are multiplied by the weight that it has.
struct leverage_weights {
  float exponent;
  index_t score;  ///< column of the state
  /// ... of weights; of slots without one −lev/mean, 0 where nothing was measured
  index_t weight;

  /// New `scores [slots]` and `leverage [slots]` over its mean, of a prompt on all slots: weighs
  /// those that have weights, and holds the leverage of those that have none.
  void measured(std::span<const float> leverage, std::span<float> scores, head_state& state) const {
    for (std::size_t s = 0; s < scores.size(); ++s) {
      if (float& held = state.column(weight)[s]; held > 0) {
        scores[s] *= held;
      } else {
        held = -std::max(leverage[s], least);
      }
    }
  }

  /// `[heads][slots]` what scores are to be multiplied by, 1 where there is a weight. `head(i)`:
  /// `head_ref`, `state(i)`: `head_state` of all its slots, of head `i` of `heads`. Heads without
  /// the columns get no weights. Sums are in double.
  std::vector<std::vector<float>> of(std::size_t heads, const auto& head, const auto& state) const {
    index_t begin = std::numeric_limits<index_t>::max(), end = 0;
    const auto each = [&](const auto& visit) {
      for (std::size_t i = 0; i < heads; ++i) {
        const head_ref& of_head = head(i);
        const head_state& of_state = state(i);
        for (index_t s = 0; s < of_head.length() && of_state.slot_stats() > weight; ++s) {
          visit(i, of_head.position(s), of_state.column(weight)[as_size(s)]);
        }
      }
    };
    each([&](std::size_t, index_t at, float held) {
      if (held < 0) {
        begin = std::min(begin, at), end = std::max(end, at + 1);
      }
    });
    const std::size_t tokens = begin < end ? as_size(end - begin) : 0;
    std::vector<double> sum(tokens);       // of the heads' leverages, each over its mean
    std::vector<index_t> holders(tokens);  // heads that measured a slot for the token
    each([&](std::size_t, index_t at, float held) {
      if (held < 0) {
        sum[as_size(at - begin)] -= double{held}, ++holders[as_size(at - begin)];
      }
    });
    std::vector<std::vector<float>> weights(heads);
    each([&](std::size_t i, index_t at, float held) {
      float w = 1;
      if (held < 0) {
        const auto u = static_cast<float>(sum[as_size(at - begin)] / holders[as_size(at - begin)]);
        w = std::max(std::pow(u, exponent), least);
      }
      weights[i].push_back(w);
    });
    return weights;
  }

  /// Keeps `weights [slots]` of slots that have none, and multiplies their scores.
  void keep(std::span<const float> weights, head_state& state) const {
    for (std::size_t s = 0; s < weights.size(); ++s) {
      if (float& held = state.column(weight)[s]; held < 0) {
        held = weights[s], state.column(score)[s] *= held;
      }
    }
  }

 private:
  static constexpr float least = 1e-30F;  // of a weight and a leverage: 0 says there is none
};

}  // namespace kvmeld::inline v0::detail
