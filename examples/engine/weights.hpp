// SPDX-License-Identifier: MIT
/// A decoder's parameters, by Hugging Face's names.
#pragma once

#include <string>
#include <vector>

#include "engine/config.hpp"
#include "engine/matrix.hpp"

namespace engine {

class checkpoint;

/// `y = x weightᵀ + bias`, as torch's Linear.
struct linear {
  row_major_matrix weight;  ///< [out, in]
  row_vector bias;          ///< [out], or empty

  static linear load(const checkpoint& from, const std::string& name, index_t out, index_t in,
                     bool has_bias = false);

  /// `x [tokens, in]` to `y [tokens, out]`.
  void operator()(const row_major_matrix& x, row_major_matrix& y) const;
};

/// One transformer layer: attention and SwiGLU, each behind its RMSNorm.
struct layer_weights {
  row_vector attention_norm, mlp_norm;  ///< [hidden]
  linear q, k, v, o;
  linear gate, up, down;

  static layer_weights load(const checkpoint& from, const config& c, index_t layer);
};

struct weights {
  linear embedding;  ///< [vocab, hidden]; a linear, for it makes the logits where it is tied
  std::vector<layer_weights> layers;
  row_vector norm;  ///< [hidden]
  linear output;    ///< [vocab, hidden]; empty where tied

  const linear& logits() const { return output.weight.size() > 0 ? output : embedding; }

  static weights load(const checkpoint& from, const config& c);
};

}  // namespace engine
