// SPDX-License-Identifier: MIT
#include "engine/gguf/weights.hpp"

namespace engine::gguf {

namespace {

/// Reads tensors and counts them.
struct reader {
  const file& from;
  const architecture& a;
  std::size_t read = 0;

  row_vector vector(const std::string& name, index_t size) {
    ++read;
    return from.vector(name, size);
  }
  linear layer(const std::string& name, index_t out, index_t in, bool has_bias = false) {
    ++read;
    return {from.matrix(name + ".weight", out, in),
            has_bias ? vector(name + ".bias", out) : row_vector()};
  }
  /// One whose outputs are turned: pairs `(2i, 2i + 1)` of a head become `(i, i + dim/2)`.
  linear turned(const std::string& name, index_t heads) {
    const config& c = a.shape;
    linear l = layer(name, heads * c.dim, c.hidden, c.qkv_bias);
    if (a.adjacent_pairs) {
      const linear file_order = l;
      for (Eigen::Index r = 0; r < l.weight.rows(); ++r) {
        const Eigen::Index i = r % c.dim, half = c.dim / 2,
                           source = r - i + (i < half ? 2 * i : 2 * (i - half) + 1);
        l.weight.row(r) = file_order.weight.row(source);
        if (c.qkv_bias) {
          l.bias[r] = file_order.bias[source];
        }
      }
    }
    return l;
  }
};

}  // namespace

weights read_weights(const file& from, const architecture& a) {
  const config& c = a.shape;
  reader r{from, a};
  weights w;
  w.embedding = r.layer("token_embd", c.vocab, c.hidden);
  w.norm = r.vector("output_norm.weight", c.hidden);
  if (!c.tied) {
    w.output = r.layer("output", c.vocab, c.hidden);
  }
  for (index_t layer = 0; layer < c.layers; ++layer) {
    const std::string at = "blk." + std::to_string(layer) + ".";
    w.layers.push_back({
        .attention_norm = r.vector(at + "attn_norm.weight", c.hidden),
        .mlp_norm = r.vector(at + "ffn_norm.weight", c.hidden),
        .q = r.turned(at + "attn_q", c.heads),
        .k = r.turned(at + "attn_k", c.kv_heads),
        .v = r.layer(at + "attn_v", c.kv_heads * c.dim, c.hidden, c.qkv_bias),
        .o = r.layer(at + "attn_output", c.hidden, c.heads * c.dim, c.o_bias),
        .gate = r.layer(at + "ffn_gate", c.intermediate, c.hidden),
        .up = r.layer(at + "ffn_up", c.intermediate, c.hidden),
        .down = r.layer(at + "ffn_down", c.hidden, c.intermediate),
    });
  }
  from.expect_tensors(r.read + (c.rope == kvmeld::rotary::halves(c.rope.base()) ? 0 : 1));
  return w;
}

}  // namespace engine::gguf
