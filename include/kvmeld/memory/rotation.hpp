/// A model's rotation by one angle, for many rows: what moves keys and queries in position.
#pragma once

#include <Eigen/Core>
#include <cmath>    // std::rint
#include <cstddef>  // std::ptrdiff_t
#include <numbers>  // std::numbers::pi
#include <span>

#include "kvmeld/memory/rotary.hpp"

namespace kvmeld {
inline namespace v0 {

/// One rotation for many rows of floats: the sines are computed once, at the width of a vector, and
/// nothing is allocated. The angle is exact (double, brought into one turn), its sine is a float's.
/// A model without rotation: rows stay as they are.
class rotation {
 public:
  static constexpr index_t max_dim = 4096;

  /// Refused: more than `max_dim` dimensions.
  rotation(const rotary& r, index_t dim) : pairing_(r.pairs_as()), pairs_(r.rotated(dim) / 2) {
    expects(dim <= max_dim, "rotation: expected at most ", max_dim, " dimensions, got ", dim);
    frequency_.resize(pairs_), angle_.resize(pairs_), cosine_.resize(pairs_);
    reduced_.resize(pairs_), sine_.resize(pairs_);
    r.frequencies(dim, {frequency_.data(), static_cast<std::size_t>(pairs_)});
    by(0);
  }

  /// Sets the rotation: by so many positions (may be negative).
  void by(double positions) {
    constexpr double turn = 2 * std::numbers::pi;
    angle_ = positions * frequency_;
    angle_ -= turn * (angle_ / turn).rint();
    reduced_ = angle_.cast<float>();
    cosine_ = reduced_.cos();
    sine_ = reduced_.sin();
  }

  /// Rotates the first `rotated(dim)` elements of `x [dim]`, in place. The others are unchanged.
  void operator()(float* x) const {
    if (pairing_ == rotary::pairing::halves) {
      for (index_t p = 0; p < pairs_; ++p) {
        const float a = x[p], b = x[p + pairs_];
        x[p] = a * cosine_[p] - b * sine_[p];
        x[p + pairs_] = b * cosine_[p] + a * sine_[p];
      }
      return;
    }
    for (index_t p = 0; p < pairs_; ++p) {
      float* const pair = x + std::ptrdiff_t{2} * p;
      const float a = pair[0], b = pair[1];
      pair[0] = a * cosine_[p] - b * sine_[p];
      pair[1] = b * cosine_[p] + a * sine_[p];
    }
  }

 private:
  template <class Scalar>
  using array = Eigen::Array<Scalar, Eigen::Dynamic, 1, 0, max_dim / 2, 1>;

  rotary::pairing pairing_;
  index_t pairs_;
  array<double> frequency_, angle_;
  array<float> reduced_, cosine_, sine_;
};

}  // namespace v0
}  // namespace kvmeld
