/// Rotary position embedding: what an engine gives once, so that keys can be moved in position.
#pragma once

#include <Eigen/Core>
#include <cmath>    // std::pow, std::cos
#include <numbers>  // std::numbers::pi
#include <optional>

#include "kvmeld/memory/view.hpp"

namespace kvmeld {
inline namespace v0 {

/// Frequency scaling of Llama 3.1 (`rope_type: llama3`): long wavelengths are stretched by
/// `factor`, short ones kept, those between blended.
struct llama3_scaling {
  double factor = 8;
  double low = 1;   ///< low_freq_factor
  double high = 4;  ///< high_freq_factor
  index_t original_context = 8192;
};

/// RoPE (Su et al. 2021, arXiv 2104.09864): pair `p` of a head turns by `frequency(p)` a position.
struct rope {
  /// Which elements form a pair: `(i, i + d/2)` as in Hugging Face, or `(2i, 2i + 1)`.
  enum class pairing { half_split, interleaved };

  double base = 10'000;
  pairing layout = pairing::half_split;
  std::optional<llama3_scaling> llama3 = std::nullopt;

  /// Radians a position, of pair `p` in `0 .. dim/2 - 1`.
  double frequency(index_t p, index_t dim) const { return scaled(std::pow(base, -2.0 * p / dim)); }
  /// A plain frequency after the scaling, in radians a position.
  double scaled(double f) const {
    if (!llama3) {
      return f;
    }
    const double wavelength = 2 * std::numbers::pi / f;
    const double turns = llama3->original_context / wavelength;
    const double blend = (turns - llama3->low) / (llama3->high - llama3->low);
    return blend >= 1   ? f
           : blend <= 0 ? f / llama3->factor
                        : (1 - blend) * f / llama3->factor + blend * f;
  }

  /// Rotates `x [dim]` on by `positions` (may be negative), in place. An odd last element is
  /// unchanged.
  template <class Scalar>
  void rotate(row<Scalar> x, index_t dim, double positions) const {
    for (index_t p = 0; p < dim / 2; ++p) {
      const double angle = positions * frequency(p, dim);
      turn_pair(x, dim, p, std::cos(angle), std::sin(angle));
    }
  }

  /// Rotates pair `p` of `x [dim]` by the angle of this cosine and sine.
  template <class Scalar>
  void turn_pair(row<Scalar> x, index_t dim, index_t p, double cosine, double sine) const {
    const index_t i = layout == pairing::half_split ? p : 2 * p;
    const index_t j = layout == pairing::half_split ? p + dim / 2 : 2 * p + 1;
    const double a = static_cast<float>(x[i]), b = static_cast<float>(x[j]);
    x[i] = static_cast<Scalar>(static_cast<float>(a * cosine - b * sine));
    x[j] = static_cast<Scalar>(static_cast<float>(b * cosine + a * sine));
  }
};

/// One rotation for many rows of floats: the sines are computed once, at the width of a vector, and
/// nothing is allocated. The angle is exact (double, brought into one turn), its sine is a float's.
class rotation {
 public:
  static constexpr index_t max_dim = 4096;

  rotation(const rope& r, index_t dim) : layout_(r.layout), dim_(dim) {
    expects(dim <= max_dim, "rotation: expected at most ", max_dim, " dimensions, got ", dim);
    frequency_.resize(dim / 2), angle_.resize(dim / 2), cosine_.resize(dim / 2);
    reduced_.resize(dim / 2), sine_.resize(dim / 2);
    const double ratio = std::pow(r.base, -2.0 / dim);
    double f = 1;
    for (index_t p = 0; p < dim / 2; ++p, f *= ratio) {
      frequency_[p] = r.scaled(f);
    }
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

  /// Rotates `x [dim]`, in place. An odd last element is unchanged.
  void operator()(float* x) const {
    const index_t half = dim_ / 2;
    if (layout_ == rope::pairing::half_split) {
      for (index_t p = 0; p < half; ++p) {
        const float a = x[p], b = x[p + half];
        x[p] = a * cosine_[p] - b * sine_[p];
        x[p + half] = b * cosine_[p] + a * sine_[p];
      }
      return;
    }
    for (index_t p = 0; p < half; ++p) {
      float* const pair = x + std::ptrdiff_t{2} * p;
      const float a = pair[0], b = pair[1];
      pair[0] = a * cosine_[p] - b * sine_[p];
      pair[1] = b * cosine_[p] + a * sine_[p];
    }
  }

 private:
  template <class Scalar>
  using pairs = Eigen::Array<Scalar, Eigen::Dynamic, 1, 0, max_dim / 2, 1>;

  rope::pairing layout_;
  index_t dim_;
  pairs<double> frequency_, angle_;
  pairs<float> reduced_, cosine_, sine_;
};

}  // namespace v0
}  // namespace kvmeld
