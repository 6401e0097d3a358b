// SPDX-License-Identifier: MIT
/// Softmax of logits that come in parts.
#pragma once

#include <algorithm>  // std::max
#include <cmath>      // std::exp
#include <limits>     // std::numeric_limits

#include "kvmeld/detail/arithmetic.hpp"

namespace kvmeld::inline v0 {
namespace score {

/// The largest of the logits that came, and the sum of their exp below it (online softmax; Milakov
/// and Gimelshein 2018). Nothing, or logits of −∞ alone: the largest is −∞, the sum 0.
template <class Scalar = float>
struct softmax {
  static constexpr Scalar nothing = -std::numeric_limits<Scalar>::infinity();
  Scalar max = nothing, sum = 0;

  /// Takes a row of logits in, which becomes its exp below the largest so far. Returned: what was
  /// below the largest before, times this is below the one now.
  template <class Row>
  Scalar take(Row&& logits) {
    const Scalar largest = std::max(logits.maxCoeff(), max);
    if (largest == nothing) {
      logits.setZero();
      return 1;
    }
    const Scalar rescale = below(largest);
    logits = (logits - largest).exp();
    sum = detail::multiply_add(sum, rescale, logits.sum());
    max = largest;
    return rescale;
  }
  /// Takes one logit in.
  void add(Scalar logit) {
    if (logit == nothing) {
      return;
    }
    if (logit <= max) {
      sum += std::exp(logit - max);
    } else {
      sum = sum * below(logit) + 1;
      max = logit;
    }
  }
  /// Takes in what another has seen. Either order gives the same bits: what is below is multiplied.
  void merge(const softmax& other) {
    const softmax low = max < other.max ? *this : other, top = max < other.max ? other : *this;
    sum = top.max == nothing ? 0 : detail::multiply_add(low.sum, low.below(top.max), top.sum);
    max = top.max;
  }

  /// What is below the largest here, times this is below `largest`, which is no less.
  Scalar below(Scalar largest) const { return std::exp(max - largest); }
  Scalar log_sum_exp() const { return max == nothing ? nothing : max + std::log(sum); }
};

}  // namespace score
}  // namespace kvmeld::inline v0
