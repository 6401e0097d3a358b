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

/// One transformer layer: attention and a gated MLP, each behind its RMSNorm. Norms that a model
/// lacks are empty.
struct layer_weights {
  row_vector attention_norm, mlp_norm;            ///< [hidden]
  row_vector attention_post_norm, mlp_post_norm;  ///< [hidden], of what is added to the stream
  row_vector q_norm, k_norm;                      ///< [dim], of a head
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
  const char *q_norm, *k_norm, *attention_post_norm, *mlp_post_norm;
};

/// `from.matrix(name, rows, columns)` and `from.vector(name, size)` throw `format_error` for what
/// is not there, or has another shape.
template <class Source>
weights read_weights(const Source& from, const config& c, const tensor_names& n) {
  const auto load = [&](const std::string& name, index_t out, index_t in, bool bias = false) {
    return linear{from.matrix(name + ".weight", out, in),
                  bias ? from.vector(name + ".bias", out) : row_vector()};
  };
  const auto norm = [&](const std::string& name, index_t size, bool is_there) {
    return is_there ? from.vector(name + ".weight", size) : row_vector();
  };
  weights w;
  w.embedding = load(n.embedding, c.vocab, c.hidden);
  for (index_t layer = 0; layer < c.layers; ++layer) {
    const std::string at = n.layer + std::to_string(layer) + ".";
    w.layers.push_back({
        .attention_norm = norm(at + n.attention_norm, c.hidden, true),
        .mlp_norm = norm(at + n.mlp_norm, c.hidden, true),
        .attention_post_norm = norm(at + n.attention_post_norm, c.hidden, c.post_norms),
        .mlp_post_norm = norm(at + n.mlp_post_norm, c.hidden, c.post_norms),
        .q_norm = norm(at + n.q_norm, c.dim, c.qk_norm),
        .k_norm = norm(at + n.k_norm, c.dim, c.qk_norm),
        .q = load(at + n.q, c.heads * c.dim, c.hidden, c.qkv_bias),
        .k = load(at + n.k, c.kv_heads * c.dim, c.hidden, c.qkv_bias),
        .v = load(at + n.v, c.kv_heads * c.dim, c.hidden, c.qkv_bias),
        .o = load(at + n.o, c.hidden, c.heads * c.dim, c.o_bias),
        .gate = load(at + n.gate, c.intermediate, c.hidden),
        .up = load(at + n.up, c.intermediate, c.hidden),
        .down = load(at + n.down, c.hidden, c.intermediate),
    });
  }
  w.norm = norm(n.norm, c.hidden, true);
  if (!c.tied) {
    w.output = load(n.output, c.vocab, c.hidden);
  }
  return w;
}

}  // namespace engine
