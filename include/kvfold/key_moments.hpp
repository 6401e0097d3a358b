/// Running mean and second moment of un-rotated keys.
#pragma once

#include <algorithm>  // std::min
#include <cstddef>    // std::size_t

#include "kvfold/convert.hpp"
#include "kvfold/rope.hpp"

namespace kvfold {

/// A view of flat floats. Means rather than sums, so that they stay exact enough in float however
/// many keys come.
struct key_moments {
  float* mean;    ///< [dim] E[x]
  float* second;  ///< E[x xᵀ], the lower triangle row by row
  index_t dim;

  static std::size_t floats(index_t dim) {
    const auto d = static_cast<std::size_t>(dim);
    return d + d * (d + 1) / 2;
  }
  key_moments(float* floats, index_t d) : mean(floats), second(floats + d), dim(d) {}

  /// Row `i` of the triangle `[i + 1]`.
  float* row_of_second(index_t i) const { return second + std::ptrdiff_t{i} * (i + 1) / 2; }

  /// Takes in the keys of the slots at `from` and later positions, `n` having been counted before;
  /// returns how many are in it then. A few at a time, so that the triangle is swept less often.
  index_t add(const kv_head auto& head, const rope& rope, index_t from, index_t n) const {
    static constexpr index_t most = 4;
    float x[most][rotation::most_dim];
    rotation turn(rope, dim);
    index_t held = 0;
    const auto flush = [&] {
      n = std::min(n + held, index_t{1} << 24);
      const float share = 1.0F / static_cast<float>(n), lost = static_cast<float>(held) * share;
      for (; held < most; ++held) {
        std::fill_n(x[held], dim, 0.0F);
      }
      for (index_t i = 0; i < dim; ++i) {
        const float a = share * x[0][i], b = share * x[1][i], c = share * x[2][i],
                    d = share * x[3][i];
        mean[i] += a + b + c + d - lost * mean[i];
        float* m = row_of_second(i);
        for (index_t j = 0; j <= i; ++j) {
          m[j] += a * x[0][j] + b * x[1][j] + c * x[2][j] + d * x[3][j] - lost * m[j];
        }
      }
      held = 0;
    };
    for (index_t s = 0; s < head.length(); ++s) {
      if (head.position(s) >= from) {
        to_floats(head.key(s), dim, x[held]);
        turn.by(-head.position(s));
        turn(x[held]);
        if (++held == most) {
          flush();
        }
      }
    }
    if (held > 0) {
      flush();
    }
    return n;
  }
};

}  // namespace kvfold
