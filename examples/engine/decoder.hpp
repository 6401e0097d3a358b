// SPDX-License-Identifier: MIT
/// A llama-family decoder whose attention is the caller's: where KV-cache policies plug in.
#pragma once

#include <concepts>
#include <filesystem>
#include <functional>  // std::function, std::ref
#include <numeric>     // std::iota
#include <span>
#include <utility>
#include <vector>

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
    rotation turns, window_turns;
    std::vector<index_t> positions;
  };

  decoder(const config& shape, weights parameters)
      : shape_(shape), weights_(std::move(parameters)) {}

  /// A Hugging Face folder: `config.json` and safetensors.
  static decoder load(const std::filesystem::path& folder);

  const config& shape() const { return shape_; }
  const weights& parameters() const { return weights_; }

  /// One block of tokens at positions `first` and on. `logits [tokens, vocab]`, or `[1, vocab]` of
  /// the last token alone.
  void forward(scratch& s, std::span<const int> tokens, index_t first, attention auto&& attend,
               row_major_matrix& logits, bool last_only = false) const {
    s.positions.resize(tokens.size());
    std::iota(s.positions.begin(), s.positions.end(), first);
    forward(s, tokens, s.positions, attend, logits, last_only);
  }

  /// Each token at a position of its own: tokens of one sequence, or of several side by side.
  void forward(scratch& s, std::span<const int> tokens, std::span<const index_t> positions,
               attention auto&& attend, row_major_matrix& logits, bool last_only = false) const {
    run(s, tokens, positions, std::ref(attend), logits, last_only);
  }

 private:
  using attend_function =
      std::function<void(index_t, const row_major_matrix&, const row_major_matrix&,
                         const row_major_matrix&, row_major_matrix&)>;

  /// Compiled once, for any attention.
  void run(scratch& s, std::span<const int> tokens, std::span<const index_t> positions,
           const attend_function& attend, row_major_matrix& logits, bool last_only) const;
  void embed(std::span<const int> tokens, row_major_matrix& stream) const;
  /// RMSNorm of every `weight.size()` numbers of a row; without weights `y` is `x`. They may be
  /// one.
  void normalize(const row_major_matrix& x, const row_vector& weight, row_major_matrix& y) const;

  config shape_;
  weights weights_;
};

}  // namespace engine
