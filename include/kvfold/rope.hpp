/// Rotary position embedding: what an engine tells us once, so that keys can be moved in position.
#pragma once

#include <cmath>    // std::pow, std::cos
#include <numbers>  // std::numbers::pi
#include <optional>

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
    const index_t half = dim / 2;
    for (index_t p = 0; p < half; ++p) {
      const index_t i = layout == pairing::half_split ? p : 2 * p;
      const index_t j = layout == pairing::half_split ? p + half : 2 * p + 1;
      const double angle = positions * frequency(p, dim);
      const double c = std::cos(angle), s = std::sin(angle);
      const double a = static_cast<float>(x[i]), b = static_cast<float>(x[j]);
      x[i] = static_cast<Scalar>(static_cast<float>(a * c - b * s));
      x[j] = static_cast<Scalar>(static_cast<float>(b * c + a * s));
    }
  }
};

}  // namespace kvfold
