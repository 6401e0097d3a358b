// SPDX-License-Identifier: MIT
/// RoPE for a block of tokens: sines and cosines once, for all layers and heads.
#pragma once

#include <cmath>  // std::cos
#include <span>

#include "engine/matrix.hpp"
#include "kvmeld/memory/rotation.hpp"

namespace engine {

/// In float, as Hugging Face computes it. Keeps its memory from block to block.
class rotation {
 public:
  void prepare(const kvmeld::rotary& rope, index_t dim, std::span<const index_t> positions) {
    frequency_.resize(dim / 2);
    for (index_t p = 0; p < dim / 2; ++p) {
      frequency_[p] = static_cast<float>(rope.frequency(p, dim));
    }
    const auto tokens = static_cast<Eigen::Index>(positions.size());
    cos_.resize(tokens, dim / 2);
    sin_.resize(tokens, dim / 2);
    for (Eigen::Index t = 0; t < tokens; ++t) {
      const auto position = static_cast<float>(positions[as_size(t)]);
      for (Eigen::Index p = 0; p < dim / 2; ++p) {
        cos_(t, p) = std::cos(position * frequency_[p]);
        sin_(t, p) = std::sin(position * frequency_[p]);
      }
    }
  }

  /// Turns every head of `x [tokens, heads * dim]`; pairs are `(i, i + dim/2)`.
  void apply(row_major_matrix& x) const {
    const Eigen::Index half = cos_.cols();
    for (Eigen::Index t = 0; t < x.rows(); ++t) {
      const float* const c = cos_.row(t).data();
      const float* const s = sin_.row(t).data();
      for (float* head = x.row(t).data(); head != x.row(t).data() + x.cols(); head += 2 * half) {
        for (Eigen::Index p = 0; p < half; ++p) {
          const float a = head[p], b = head[p + half];
          head[p] = a * c[p] - b * s[p];
          head[p + half] = b * c[p] + a * s[p];
        }
      }
    }
  }

 private:
  row_vector frequency_;
  row_major_matrix cos_, sin_;  // [tokens, dim / 2]
};

}  // namespace engine
