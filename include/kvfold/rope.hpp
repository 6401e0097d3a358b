/// Rotary position embedding: what an engine tells us once, so that keys can be moved in position.
#pragma once

#include <cmath>    // std::pow, std::cos
#include <numbers>  // std::numbers::pi
#include <optional>
#include <vector>

#include "kvfold/view.hpp"

namespace kvfold {

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
  double frequency(index_t p, index_t dim) const {
    const double f = std::pow(base, -2.0 * p / dim);
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

  /// Turns `x [dim]` on by `positions` (may be negative), in place. An odd last element stays.
  template <class Scalar>
  void rotate(row<Scalar> x, index_t dim, double positions) const {
    for (index_t p = 0; p < dim / 2; ++p) {
      const double angle = positions * frequency(p, dim);
      turn_pair(x, dim, p, std::cos(angle), std::sin(angle));
    }
  }

  /// Turns pair `p` of `x [dim]` by the angle of this cosine and sine.
  template <class Scalar>
  void turn_pair(row<Scalar> x, index_t dim, index_t p, double cosine, double sine) const {
    const index_t i = layout == pairing::half_split ? p : 2 * p;
    const index_t j = layout == pairing::half_split ? p + dim / 2 : 2 * p + 1;
    const double a = static_cast<float>(x[i]), b = static_cast<float>(x[j]);
    x[i] = static_cast<Scalar>(static_cast<float>(a * cosine - b * sine));
    x[j] = static_cast<Scalar>(static_cast<float>(b * cosine + a * sine));
  }
};

/// One rotation for many rows: cosines and sines are computed once.
class rotation {
 public:
  rotation(const rope& r, index_t dim) : rope_(r), dim_(dim) {
    for (index_t p = 0; p < dim / 2; ++p) {
      frequency_.push_back(r.frequency(p, dim));
    }
    cosine_.resize(frequency_.size()), sine_.resize(frequency_.size());
    by(0);
  }

  /// From now on by so many positions.
  void by(double positions) {
    for (std::size_t p = 0; p < frequency_.size(); ++p) {
      cosine_[p] = std::cos(positions * frequency_[p]);
      sine_[p] = std::sin(positions * frequency_[p]);
    }
  }
  template <class Scalar>
  void operator()(row<Scalar> x) const {
    for (std::size_t p = 0; p < frequency_.size(); ++p) {
      rope_.turn_pair(x, dim_, static_cast<index_t>(p), cosine_[p], sine_[p]);
    }
  }

 private:
  rope rope_;
  index_t dim_;
  std::vector<double> frequency_, cosine_, sine_;
};

}  // namespace kvfold
