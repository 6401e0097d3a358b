// SPDX-License-Identifier: MIT
#include "engine/decoder.hpp"

#include <algorithm>  // std::max
#include <cmath>      // std::sqrt
#include <numbers>    // std::numbers::pi

#include "engine/safetensors.hpp"

namespace engine {

void linear::operator()(const row_major_matrix& x, row_major_matrix& y) const {
  y.resize(x.rows(), weight.rows());
  if (x.rows() <= 64) {
    // So few tokens do not pay for the packing of a product. The weights are read from memory once,
    // 32 KiB at a time, and from the nearest cache for every token.
    const Eigen::Index block = std::max<Eigen::Index>(8, (1 << 13) / weight.cols() / 8 * 8);
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
  constexpr tensor_names names = {"model.embed_tokens",
                                  "model.norm",
                                  "lm_head",
                                  "model.layers.",
                                  "input_layernorm",
                                  "post_attention_layernorm",
                                  "self_attn.q_proj",
                                  "self_attn.k_proj",
                                  "self_attn.v_proj",
                                  "self_attn.o_proj",
                                  "mlp.gate_proj",
                                  "mlp.up_proj",
                                  "mlp.down_proj",
                                  "self_attn.q_norm",
                                  "self_attn.k_norm",
                                  "",
                                  ""};
  return {shape, read_weights(checkpoint(folder), shape, names)};
}

namespace {

/// `silu(gate) · up`, or `gelu(gate) · up`, in place of the gate.
void activate(activation by, row_major_matrix& gate, const row_major_matrix& up) {
  auto g = gate.array();
  if (by == activation::silu) {
    g *= up.array() / (1 + (-g).exp());
  } else {
    const float root = std::sqrt(2 / std::numbers::pi_v<float>);
    g *= 0.5F * up.array() * (1 + (root * (g + 0.044715F * g.cube())).tanh());
  }
}

}  // namespace

void decoder::run(scratch& s, std::span<const int> tokens, std::span<const index_t> positions,
                  const attend_function& attend, row_major_matrix& logits, bool last_only) const {
  expects(positions.size() == tokens.size(), "forward: expected ", tokens.size(),
          " positions, got ", positions.size());
  embed(tokens, s.stream);
  s.turns.prepare(shape_.rope, shape_.dim, positions);
  if (shape_.window > 0) {
    s.window_turns.prepare(shape_.window_rope, shape_.dim, positions);
  }
  for (index_t layer = 0; layer < shape_.layers; ++layer) {
    const auto& w = weights_.layers[as_size(layer)];
    normalize(s.stream, w.attention_norm, s.normed);
    w.q(s.normed, s.q);
    w.k(s.normed, s.k);
    w.v(s.normed, s.v);
    normalize(s.q, w.q_norm, s.q);
    normalize(s.k, w.k_norm, s.k);
    const rotation& turns = shape_.windowed(layer) ? s.window_turns : s.turns;
    turns.apply(s.q);
    turns.apply(s.k);
    s.attended.resize(s.q.rows(), s.q.cols());
    attend(layer, s.q, s.k, s.v, s.attended);
    w.o(s.attended, s.projected);
    normalize(s.projected, w.attention_post_norm, s.projected);
    s.stream += s.projected;

    normalize(s.stream, w.mlp_norm, s.normed);
    w.gate(s.normed, s.gate);
    w.up(s.normed, s.up);
    activate(shape_.mlp, s.gate, s.up);
    w.down(s.gate, s.projected);
    normalize(s.projected, w.mlp_post_norm, s.projected);
    s.stream += s.projected;
  }
  if (last_only && tokens.size() > 1) {
    s.projected = s.stream.bottomRows(1);
    s.stream = s.projected;
  }
  normalize(s.stream, weights_.norm, s.normed);
  weights_.logits()(s.normed, logits);
  if (shape_.logit_cap > 0) {
    logits = (logits.array() / shape_.logit_cap).tanh() * shape_.logit_cap;
  }
}

void decoder::embed(std::span<const int> tokens, row_major_matrix& stream) const {
  expects(!tokens.empty(), "forward: expected at least 1 token, got 0");
  stream.resize(static_cast<Eigen::Index>(tokens.size()), shape_.hidden);
  for (Eigen::Index t = 0; t < stream.rows(); ++t) {
    const int token = tokens[as_size(t)];
    expects(token >= 0 && token < shape_.vocab, "forward: expected tokens 0 to ", shape_.vocab - 1,
            ", got ", token);
    stream.row(t) = shape_.embedding_scale * weights_.embedding.weight.row(token);
  }
}

void decoder::normalize(const row_major_matrix& x, const row_vector& weight,
                        row_major_matrix& y) const {
  if (weight.size() == 0) {
    y = x;
    return;
  }
  y.resize(x.rows(), x.cols());
  const Eigen::Index width = weight.size();
  for (Eigen::Index t = 0; t < x.rows(); ++t) {
    for (Eigen::Index first = 0; first < x.cols(); first += width) {
      const auto part = x.row(t).segment(first, width);
      const float mean = part.squaredNorm() / static_cast<float>(width);
      const float scale = 1 / std::sqrt(mean + shape_.norm_epsilon);
      y.row(t).segment(first, width) = (part * scale).cwiseProduct(weight);
    }
  }
}

}  // namespace engine
