// SPDX-License-Identifier: MIT
/// Softmax of logits that come in parts, and what a model's logits are beside `scale · q·k +
/// log-mass`: a soft cap, ALiBi, a window, a sink.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::max
#include <cmath>      // std::exp
#include <limits>     // std::numeric_limits

#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/memory/view.hpp"

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

/// Of the query heads `g` of one KV head. A model without these terms leaves every number as it is.
/// What few models have is out of line: attention's sweep takes in what all of them run.
class logit_terms {
 public:
  explicit logit_terms(const head_ref& head)
      : scale_(head.scale()),
        soft_cap_(head.spec().soft_cap),
        sinks_(head.of_group(head.spec().sink_logits)),
        slopes_(head.of_group(head.spec().alibi_slopes)),
        window_(head.spec().window) {}

  bool caps() const { return soft_cap_ > 0; }
  /// Does a slot's place say anything of its logit?
  bool by_place() const { return slopes_ != nullptr || window_ > 0; }

  /// `cap · tanh(logit / cap)` (Gemma 2; Bello et al. 2016, arXiv 1611.09940).
  float cap(float logit) const { return caps() ? soft_cap_ * std::tanh(logit / soft_cap_) : logit; }
  /// The same of products, in place: `scale` times the new one is the capped logit. Whole vectors,
  /// so that no number's bits depend on where it stands.
  template <class Products>
  KVMELD_NOINLINE void cap_products(Products&& dots) const {
    dots = (dots * (scale_ / soft_cap_)).tanh() * (soft_cap_ / scale_);
  }
  /// What the places of `count` slots from `first` on make of their logits, for query head `g` at
  /// `position`: ALiBi (Press et al. 2022, arXiv 2108.12409) is added, and those that have left the
  /// window are −∞.
  KVMELD_NOINLINE void place(const head_ref& head, index_t g, index_t position, index_t first,
                             index_t count, float* logit) const {
    for (index_t i = 0; slopes_ != nullptr && i < count; ++i) {
      logit[i] += slopes_[g] * static_cast<float>(head.position(first + i) - position);
    }
    for (index_t i = 0; window_ > 0 && i < count; ++i) {
      if (position - head.position(first + i) >= window_) {
        logit[i] = softmax<>::nothing;
      }
    }
  }
  /// What a softmax begins with: the mass that no slot has (gpt-oss), or nothing.
  softmax<> sink(index_t g) const {
    softmax<> all;
    if (sinks_ != nullptr) {
      all = {sinks_[g], 1};
    }
    return all;
  }

 private:
  float scale_, soft_cap_;
  const float *sinks_, *slopes_;  // [group], or null
  index_t window_;
};

}  // namespace score
}  // namespace kvmeld::inline v0
