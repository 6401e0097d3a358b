/// Running mean and second moment of un-rotated keys.
#pragma once

#include <algorithm>  // std::min
#include <cstddef>    // std::size_t

#include "kvfold/memory/convert.hpp"
#include "kvfold/memory/rope.hpp"
#include "kvfold/score/tile_products.hpp"

namespace kvfold {
inline namespace v0 {
namespace score {

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

  /// Adds the keys of the slots at `from` and later positions to the moments of `n`; returns the
  /// count then. As many at a time as fit the nearest caches, so that the
  /// triangle is swept less often.
  index_t add(const kv_head auto& head, const rope& rope, index_t from, index_t n) const {
    static constexpr index_t floats = 4 * rotation::max_dim, max_keys = 64;
    const index_t most = std::min(floats / dim, max_keys);
    float x[floats], share_of[max_keys], sum[rotation::max_dim];
    rotation turn(rope, dim);
    index_t held = 0;
    const auto flush = [&] {
      n = std::min(n + held, index_t{1} << 24);
      const float share = 1.0F / static_cast<float>(n), lost = static_cast<float>(held) * share;
      for (index_t i = 0; i < dim; ++i) {
        float all = 0;
        for (index_t r = 0; r < held; ++r) {
          share_of[r] = share * x[std::ptrdiff_t{r} * dim + i];
          all += share_of[r];
        }
        mean[i] += all - lost * mean[i];
        // Row i of the triangle, in whole vectors.
        const index_t width = std::min((i / lanes + 1) * lanes, dim);
        std::fill_n(sum, width, 0.0F);
        pv_tile(share_of, 0, 1, {x, held, width, Eigen::OuterStride<>(dim)}, sum);
        float* const m = row_of_second(i);
        for (index_t j = 0; j <= i; ++j) {
          m[j] += sum[j] - lost * m[j];
        }
      }
      held = 0;
    };
    for (index_t s = 0; s < head.length(); ++s) {
      if (head.position(s) >= from) {
        float* const key = x + std::ptrdiff_t{held} * dim;
        to_floats(head.key(s), dim, key);
        turn.by(-head.position(s));
        turn(key);
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

}  // namespace score
}  // namespace v0
}  // namespace kvfold
