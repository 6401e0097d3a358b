/// A llama-family decoder whose attention is the caller's: where KV-cache policies plug in.
#pragma once

#include <cmath>  // std::sqrt
#include <concepts>
#include <filesystem>
#include <numeric>  // std::iota
#include <span>
#include <utility>
#include <vector>

#include "engine/checkpoint.hpp"
#include "engine/config.hpp"
#include "engine/matrix.hpp"
#include "engine/rotation.hpp"
#include "engine/weights.hpp"

namespace engine {

/// `attention(layer, q, k, v, out)`: rotated queries `q [tokens, heads * dim]` and keys
/// `k [tokens, kv_heads * dim]`, values `v` likewise; fills `out [tokens, heads * dim]`.
template <class A>
concept attention = std::invocable<A&, index_t, const row_major_matrix&, const row_major_matrix&,
                                   const row_major_matrix&, row_major_matrix&>;

/// Holds no sequence: the keys and values of what came before are the caller's. Several threads may
/// run one decoder, each with its own scratch. Single-threaded by itself: compile without OpenMP.
class decoder {
 public:
  /// Memory that `forward` works in. Kept between calls, decoding token by token allocates nothing.
  struct scratch {
    row_major_matrix stream, normed;  // [tokens, hidden]
    row_major_matrix q, k, v, attended, projected;
    row_major_matrix gate, up;  // [tokens, intermediate]
    rotation turns;
    std::vector<index_t> positions;
  };

  decoder(const config& shape, weights parameters)
      : shape_(shape), weights_(std::move(parameters)) {}

  /// A Hugging Face folder: `config.json` and safetensors.
  static decoder load(const std::filesystem::path& folder) {
    const auto shape = config::read(folder / "config.json");
    return {shape, weights::load(checkpoint(folder), shape)};
  }

  const config& shape() const { return shape_; }

  /// One block of tokens at positions `first` and on. `logits [tokens, vocab]`, or `[1, vocab]` of
  /// the last token alone.
  void forward(std::span<const int> tokens, index_t first, attention auto&& attend,
               row_major_matrix& logits, bool last_only = false) const {
    scratch own;
    forward(own, tokens, first, attend, logits, last_only);
  }
  void forward(scratch& s, std::span<const int> tokens, index_t first, attention auto&& attend,
               row_major_matrix& logits, bool last_only = false) const {
    s.positions.resize(tokens.size());
    std::iota(s.positions.begin(), s.positions.end(), first);
    forward(s, tokens, s.positions, attend, logits, last_only);
  }

  /// Each token at a position of its own: tokens of one sequence, or of several side by side.
  void forward(scratch& s, std::span<const int> tokens, std::span<const index_t> positions,
               attention auto&& attend, row_major_matrix& logits, bool last_only = false) const {
    expects(positions.size() == tokens.size(), "forward: ", tokens.size(), " positions expected, ",
            positions.size(), " came");
    embed(tokens, s.stream);
    s.turns.prepare(shape_.rope, shape_.dim, positions);
    for (index_t layer = 0; layer < shape_.layers; ++layer) {
      const auto& w = weights_.layers[static_cast<std::size_t>(layer)];
      normalize(s.stream, w.attention_norm, s.normed);
      w.q(s.normed, s.q);
      w.k(s.normed, s.k);
      w.v(s.normed, s.v);
      s.turns.apply(s.q);
      s.turns.apply(s.k);
      s.attended.resize(s.q.rows(), s.q.cols());
      attend(layer, std::as_const(s.q), std::as_const(s.k), std::as_const(s.v), s.attended);
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

 private:
  void embed(std::span<const int> tokens, row_major_matrix& stream) const {
    expects(!tokens.empty(), "forward: at least one token expected, none came");
    stream.resize(static_cast<Eigen::Index>(tokens.size()), shape_.hidden);
    for (Eigen::Index t = 0; t < stream.rows(); ++t) {
      const int token = tokens[static_cast<std::size_t>(t)];
      expects(token >= 0 && token < shape_.vocab, "forward: tokens 0 to ", shape_.vocab - 1,
              " expected, ", token, " came");
      stream.row(t) = weights_.embedding.weight.row(token);
    }
  }

  /// RMSNorm.
  void normalize(const row_major_matrix& x, const row_vector& weight, row_major_matrix& y) const {
    y.resize(x.rows(), x.cols());
    const auto width = static_cast<float>(x.cols());
    for (Eigen::Index t = 0; t < x.rows(); ++t) {
      const float scale = 1 / std::sqrt(x.row(t).squaredNorm() / width + shape_.norm_epsilon);
      y.row(t) = (x.row(t) * scale).cwiseProduct(weight);
    }
  }

  config shape_;
  weights weights_;
};

}  // namespace engine
