// SPDX-License-Identifier: MIT
#include "engine/decoder.hpp"

#include <algorithm>  // std::max
#include <cmath>      // std::sqrt

#include "engine/safetensors.hpp"

namespace engine {

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

decoder decoder::load(const std::filesystem::path& folder) {
  const auto shape = config::read(folder / "config.json");
  constexpr tensor_names names = {
      "model.embed_tokens", "model.norm",       "lm_head",
      "model.layers.",      "input_layernorm",  "post_attention_layernorm",
      "self_attn.q_proj",   "self_attn.k_proj", "self_attn.v_proj",
      "self_attn.o_proj",   "mlp.gate_proj",    "mlp.up_proj",
      "mlp.down_proj"};
  return {shape, read_weights(checkpoint(folder), shape, names)};
}

void decoder::run(scratch& s, std::span<const int> tokens, std::span<const index_t> positions,
                  const attend_function& attend, row_major_matrix& logits, bool last_only) const {
  expects(positions.size() == tokens.size(), "forward: expected ", tokens.size(),
          " positions, got ", positions.size());
  embed(tokens, s.stream);
  s.turns.prepare(shape_.rope, shape_.dim, positions);
  for (index_t layer = 0; layer < shape_.layers; ++layer) {
    const auto& w = weights_.layers[as_size(layer)];
    normalize(s.stream, w.attention_norm, s.normed);
    w.q(s.normed, s.q);
    w.k(s.normed, s.k);
    w.v(s.normed, s.v);
    s.turns.apply(s.q);
    s.turns.apply(s.k);
    s.attended.resize(s.q.rows(), s.q.cols());
    attend(layer, s.q, s.k, s.v, s.attended);
    w.o(s.attended, s.projected);
    s.stream += s.projected;

    normalize(s.stream, w.mlp_norm, s.normed);
    w.gate(s.normed, s.gate);
    w.up(s.normed, s.up);
    s.gate.array() *= s.up.array() / (1 + (-s.gate.array()).exp());  // silu(gate) · up
    w.down(s.gate, s.projected);
    s.stream += s.projected;
  }
  if (last_only && tokens.size() > 1) {
    s.projected = s.stream.bottomRows(1);
    s.stream = s.projected;
  }
  normalize(s.stream, weights_.norm, s.normed);
  weights_.logits()(s.normed, logits);
}

void decoder::embed(std::span<const int> tokens, row_major_matrix& stream) const {
  expects(!tokens.empty(), "forward: expected at least 1 token, got 0");
  stream.resize(static_cast<Eigen::Index>(tokens.size()), shape_.hidden);
  for (Eigen::Index t = 0; t < stream.rows(); ++t) {
    const int token = tokens[as_size(t)];
    expects(token >= 0 && token < shape_.vocab, "forward: expected tokens 0 to ", shape_.vocab - 1,
            ", got ", token);
    stream.row(t) = weights_.embedding.weight.row(token);
  }
}

void decoder::normalize(const row_major_matrix& x, const row_vector& weight,
                        row_major_matrix& y) const {
  y.resize(x.rows(), x.cols());
  const auto width = static_cast<float>(x.cols());
  for (Eigen::Index t = 0; t < x.rows(); ++t) {
    const float scale = 1 / std::sqrt(x.row(t).squaredNorm() / width + shape_.norm_epsilon);
    y.row(t) = (x.row(t) * scale).cwiseProduct(weight);
  }
}

}  // namespace engine
