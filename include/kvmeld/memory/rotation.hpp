// SPDX-License-Identifier: MIT
/// A model's rotation by one angle, for many rows: what moves keys and queries in position.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::min
#include <cstddef>    // std::ptrdiff_t
#include <numbers>    // std::numbers::pi
#include <span>
#include <vector>

#include "kvmeld/memory/rotary.hpp"

namespace kvmeld {
inline namespace v0 {

/// One rotation for many rows of floats: the sines are computed once, at the width of a vector, and
/// nothing is allocated for up to 640 dimensions, so that it fits on any stack. The angle is exact
/// (double, brought into one turn), its sine is a float's. A model without rotation: rows stay as
/// they are.
class rotation {
 public:
  static constexpr index_t max_dim = 4096;

  /// Refused: more than `max_dim` dimensions.
  rotation(const rotary& r, index_t dim) : pairing_(r.pairs_as()), pairs_(r.rotated(dim) / 2) {
    expects(dim <= max_dim, "rotation: expected at most ", max_dim, " dimensions, got ", dim);
    if (pairs_ > own_pairs) {
      more_frequencies_.resize(static_cast<std::size_t>(pairs_));
      more_turns_.resize(2 * static_cast<std::size_t>(pairs_));
    }
    r.frequencies(dim, {frequencies(), static_cast<std::size_t>(pairs_)});
    by(0);
  }

  /// Sets the rotation: by so many positions (may be negative).
  void by(double positions) {
    constexpr double turn = 2 * std::numbers::pi;
    // On the stack; the count is written out, since nvcc's front end gives every later use of a
    // type the words of its first, and a constant's name means nothing elsewhere.
    Eigen::Array<double, 64, 1> angle;
    Eigen::Array<float, 64, 1> reduced, turned;
    constexpr index_t few = decltype(angle)::SizeAtCompileTime;
    for (index_t p = 0; p < pairs_; p += few) {
      const index_t count = std::min(few, pairs_ - p);
      angle.head(count) = positions * Eigen::Map<const Eigen::ArrayXd>(frequencies() + p, count);
      angle.head(count) -= turn * (angle.head(count) / turn).rint();
      reduced.head(count) = angle.head(count).cast<float>();
      turned.head(count) = reduced.head(count).cos();
      std::copy_n(turned.data(), count, turns() + p);
      turned.head(count) = reduced.head(count).sin();
      std::copy_n(turned.data(), count, turns() + pairs_ + p);
    }
  }

  /// Rotates the first `rotated(dim)` elements of `x [dim]`, in place. The others are unchanged.
  void operator()(float* x) const {
    const float *const cosine = turns(), *const sine = cosine + pairs_;
    if (pairing_ == rotary::pairing::halves) {
      for (index_t p = 0; p < pairs_; ++p) {
        const float a = x[p], b = x[p + pairs_];
        x[p] = a * cosine[p] - b * sine[p];
        x[p + pairs_] = b * cosine[p] + a * sine[p];
      }
      return;
    }
    for (index_t p = 0; p < pairs_; ++p) {
      float* const pair = x + std::ptrdiff_t{2} * p;
      const float a = pair[0], b = pair[1];
      pair[0] = a * cosine[p] - b * sine[p];
      pair[1] = b * cosine[p] + a * sine[p];
    }
  }

 private:
  static constexpr index_t own_pairs = 320;

  // Of an object that may be copied: where the numbers are is asked for anew.
  double* frequencies() { return pairs_ > own_pairs ? more_frequencies_.data() : own_frequencies_; }
  float* turns() { return pairs_ > own_pairs ? more_turns_.data() : own_turns_; }
  const float* turns() const { return pairs_ > own_pairs ? more_turns_.data() : own_turns_; }

  rotary::pairing pairing_;
  index_t pairs_;
  alignas(EIGEN_MAX_STATIC_ALIGN_BYTES) double own_frequencies_[own_pairs];  // [pairs]
  alignas(EIGEN_MAX_STATIC_ALIGN_BYTES) float own_turns_[2 * own_pairs];     // cosines, then sines
  std::vector<double> more_frequencies_;
  std::vector<float> more_turns_;
};

}  // namespace v0
}  // namespace kvmeld
