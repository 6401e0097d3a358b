// SPDX-License-Identifier: MIT
/// A decoder's parameters, and how they are read.
#pragma once

#include <string>
#include <vector>

#include "engine/config.hpp"
#include "engine/matrix.hpp"

namespace engine {

/// `y = x weightᵀ + bias`, as torch's Linear.
struct linear {
  row_major_matrix weight;  ///< [out, in]
  row_vector bias;          ///< [out], or empty

  /// `x [tokens, in]` to `y [tokens, out]`.
  void operator()(const row_major_matrix& x, row_major_matrix& y) const;
};

/// One transformer layer: attention and SwiGLU, each behind its RMSNorm.
struct layer_weights {
  row_vector attention_norm, mlp_norm;  ///< [hidden]
  linear q, k, v, o;
  linear gate, up, down;
};

struct weights {
  linear embedding;  ///< [vocab, hidden]; a linear, for it makes the logits where it is tied
  std::vector<layer_weights> layers;
  row_vector norm;  ///< [hidden]
  linear output;    ///< [vocab, hidden]; empty where tied

  const linear& logits() const { return output.weight.size() > 0 ? output : embedding; }
};

/// How a format names tensors. Those of a layer have its number between `layer` and their own name;
/// linears end with ".weight" and ".bias".
struct tensor_names {
  const char *embedding, *norm, *output, *layer;
  const char *attention_norm, *mlp_norm, *q, *k, *v, *o, *gate, *up, *down;
};

/// `from.matrix(name, rows, columns)` and `from.vector(name, size)` throw `format_error` for what
/// is not there, or has another shape.
template <class Source>
weights read_weights(const Source& from, const config& c, const tensor_names& n) {
  const auto load = [&](const std::string& name, index_t out, index_t in, bool bias = false) {
    return linear{from.matrix(name + ".weight", out, in),
                  bias ? from.vector(name + ".bias", out) : row_vector()};
  };
  weights w;
  w.embedding = load(n.embedding, c.vocab, c.hidden);
  for (index_t layer = 0; layer < c.layers; ++layer) {
    const std::string at = n.layer + std::to_string(layer) + ".";
    w.layers.push_back({
        .attention_norm = from.vector(at + n.attention_norm + ".weight", c.hidden),
        .mlp_norm = from.vector(at + n.mlp_norm + ".weight", c.hidden),
        .q = load(at + n.q, c.heads * c.dim, c.hidden, c.qkv_bias),
        .k = load(at + n.k, c.kv_heads * c.dim, c.hidden, c.qkv_bias),
        .v = load(at + n.v, c.kv_heads * c.dim, c.hidden, c.qkv_bias),
        .o = load(at + n.o, c.hidden, c.heads * c.dim, c.o_bias),
        .gate = load(at + n.gate, c.intermediate, c.hidden),
        .up = load(at + n.up, c.intermediate, c.hidden),
        .down = load(at + n.down, c.hidden, c.intermediate),
    });
  }
  w.norm = from.vector(n.norm + std::string(".weight"), c.hidden);
  if (!c.tied) {
    w.output = load(n.output, c.vocab, c.hidden);
  }
  return w;
}

}  // namespace engine
