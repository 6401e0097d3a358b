// SPDX-License-Identifier: MIT
/// Softmax of logits that are given in parts, and a model's logits: `scale · q·k + log-mass` with a
/// soft cap, ALiBi, a window and a sink.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::fill, std::max
#include <cmath>      // std::exp
#include <limits>     // std::numeric_limits

#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/memory/view.hpp"

namespace kvmeld::inline v0 {
namespace score {

/// A number of floats that vectors of any machine divide, and the least one from `count` on.
inline constexpr index_t whole_vectors = 16;
inline index_t padded(index_t count) {
  return (count + whole_vectors - 1) / whole_vectors * whole_vectors;
}

/// The largest `max` of the logits seen so far, and the sum of `exp(logit − max)` (online softmax;
/// Milakov and Gimelshein 2018). No logit, or logits of −∞ alone: the largest is −∞, the sum 0.
template <class Scalar = float>
struct softmax {
  /// The largest of no logits.
  static constexpr Scalar nothing = -std::numeric_limits<Scalar>::infinity();
  Scalar max = nothing, sum = 0;  ///< the largest; of `exp(logit − max)`

  /// Adds a row of logits and replaces each by `exp(logit − max)` of the new `max`. Returns the
  /// factor that makes earlier results, relative to the old `max`, relative to the new one.
  template <class Row>
  EIGEN_ALWAYS_INLINE Scalar take(Row&& logits) {
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
  /// Adds one logit.
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
  /// Adds the logits of another. Either order gives the same bits: the lower one is multiplied.
  void merge(const softmax& other) {
    const softmax low = max < other.max ? *this : other, top = max < other.max ? other : *this;
    sum = top.max == nothing ? 0 : detail::multiply_add(low.sum, low.below(top.max), top.sum);
    max = top.max;
  }

  /// `exp(max − largest)`, for a `largest` that is no less than `max`.
  Scalar below(Scalar largest) const { return std::exp(max - largest); }
  /// Of all logits, natural logarithm.
  Scalar log_sum_exp() const { return max == nothing ? nothing : max + std::log(sum); }
};

/// The logits of a layer (`attention_spec`) for the query heads `g` of one KV head, from products
/// q·k: the one place that knows their form. A model without cap, sinks, slopes or window leaves
/// every number as it is. What few models have is out of line: attention's sweep inlines what all
/// of them run.
class logit_terms {
 public:
  /// `scale · q·k + log-mass` alone.
  logit_terms(float scale) : scale_(scale) {}
  /// With the layer's cap, sinks, slopes and window.
  explicit logit_terms(const head_ref& head)
      : scale_(head.scale()),
        soft_cap_(head.spec().soft_cap),
        sinks_(head.of_group(head.spec().sink_logits)),
        slopes_(head.of_group(head.spec().alibi_slopes)),
        window_(head.spec().window),
        group_(head.group()) {}

  float scale() const { return scale_; }  ///< of products q·k
  /// 0: none.
  float soft_cap() const { return soft_cap_; }

  bool caps() const { return soft_cap_ > 0; }  ///< is there a soft cap?
  /// Does a slot's place say anything of its logit?
  bool by_place() const { return slopes_ != nullptr || window_ > 0; }

  /// `cap · tanh(logit / cap)` (Gemma 2; Bello et al. 2016, arXiv 1611.09940).
  float cap(float logit) const { return caps() ? soft_cap_ * std::tanh(logit / soft_cap_) : logit; }
  /// The same of an array of logits `scale · q·k`, in place.
  template <class Logits>
  void cap_logits(Logits&& logits) const {
    if (caps()) {
      logits = (logits / soft_cap_).tanh() * soft_cap_;
    }
  }
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
  /// Replaces the products of query head `g` at `position` with the `count` slots from `first` on
  /// by their logits, −∞ for slots of later positions. `row [padded(count)]` ends in −∞.
  void replace_products(const head_ref& head, index_t g, index_t position, index_t first,
                        index_t count, float* row) const {
    const index_t whole = padded(count);
    if (caps()) {
      std::fill(row + count, row + whole, 0.0F);
      cap_products(Eigen::Map<Eigen::ArrayXf>(row, whole));
    }
    for (index_t i = 0; i < count; ++i) {
      row[i] = scale_ * row[i] + head.log_mass(first + i);
      if (head.position(first + i) > position) {
        row[i] = softmax<>::nothing;
      }
    }
    if (by_place()) {
      place(head, g, position, first, count, row);
    }
    std::fill(row + count, row + whole, softmax<>::nothing);
  }
  /// What a softmax begins with: the mass that no slot has (gpt-oss), or nothing.
  softmax<> sink(index_t g) const {
    softmax<> all;
    if (sinks_ != nullptr) {
      all = {sinks_[g], 1};
    }
    return all;
  }
  /// The same for row `r` of `rows` queries, as many for each query head in turn.
  softmax<> sink_of_row(Eigen::Index r, Eigen::Index rows) const {
    return sinks_ != nullptr ? sink(static_cast<index_t>(r * group_ / rows)) : softmax<>();
  }

 private:
  float scale_, soft_cap_ = 0;
  const float *sinks_ = nullptr, *slopes_ = nullptr;  // [group]
  index_t window_ = 0, group_ = 1;
};

}  // namespace score
}  // namespace kvmeld::inline v0
