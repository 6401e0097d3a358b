// SPDX-License-Identifier: MIT
#include "engine/weights.hpp"

#include <algorithm>  // std::max

#include "engine/checkpoint.hpp"

namespace engine {

linear linear::load(const checkpoint& from, const std::string& name, index_t out, index_t in,
                    bool has_bias) {
  return {from.matrix(name + ".weight", out, in),
          has_bias ? from.vector(name + ".bias", out) : row_vector()};
}

void linear::operator()(const row_major_matrix& x, row_major_matrix& y) const {
  y.resize(x.rows(), weight.rows());
  if (x.rows() < 16) {
    // So few tokens do not pay for the packing of a product. The weights are read from memory once,
    // 128 KiB at a time, and from the cache for every token.
    const Eigen::Index block = std::max<Eigen::Index>(8, (1 << 15) / weight.cols());
    for (Eigen::Index first = 0; first < weight.rows(); first += block) {
      const Eigen::Index rows = std::min(block, weight.rows() - first);
      for (Eigen::Index t = 0; t < x.rows(); ++t) {
        y.row(t).segment(first, rows).transpose().noalias() =
            weight.middleRows(first, rows) * x.row(t).transpose();
      }
    }
  } else {
    y.noalias() = x * weight.transpose();
  }
  if (bias.size() > 0) {
    y.rowwise() += bias;
  }
}

layer_weights layer_weights::load(const checkpoint& from, const config& c, index_t layer) {
  const std::string at = "model.layers." + std::to_string(layer) + ".";
  const std::string attention = at + "self_attn.", mlp = at + "mlp.";
  return {
      .attention_norm = from.vector(at + "input_layernorm.weight", c.hidden),
      .mlp_norm = from.vector(at + "post_attention_layernorm.weight", c.hidden),
      .q = linear::load(from, attention + "q_proj", c.heads * c.dim, c.hidden, c.qkv_bias),
      .k = linear::load(from, attention + "k_proj", c.kv_heads * c.dim, c.hidden, c.qkv_bias),
      .v = linear::load(from, attention + "v_proj", c.kv_heads * c.dim, c.hidden, c.qkv_bias),
      .o = linear::load(from, attention + "o_proj", c.hidden, c.heads * c.dim, c.o_bias),
      .gate = linear::load(from, mlp + "gate_proj", c.intermediate, c.hidden),
      .up = linear::load(from, mlp + "up_proj", c.intermediate, c.hidden),
      .down = linear::load(from, mlp + "down_proj", c.hidden, c.intermediate),
  };
}

weights weights::load(const checkpoint& from, const config& c) {
  weights w;
  w.embedding = linear::load(from, "model.embed_tokens", c.vocab, c.hidden);
  for (index_t layer = 0; layer < c.layers; ++layer) {
    w.layers.push_back(layer_weights::load(from, c, layer));
  }
  w.norm = from.vector("model.norm.weight", c.hidden);
  if (!c.tied) {
    w.output = linear::load(from, "lm_head", c.vocab, c.hidden);
  }
  return w;
}

}  // namespace engine
