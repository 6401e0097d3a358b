// SPDX-License-Identifier: MIT
/// A model's shape, read from Hugging Face's `config.json`.
#pragma once

#include <filesystem>
#include <string_view>

#include "engine/error.hpp"
#include "kvmeld/config.hpp"
#include "kvmeld/memory/attention_spec.hpp"

namespace engine {

using kvmeld::index_t;

/// What a llama-family decoder is made of. Field names say what Hugging Face's mean.
struct config {
  index_t hidden = 0;         ///< hidden_size
  index_t intermediate = 0;   ///< intermediate_size
  index_t layers = 0;         ///< num_hidden_layers
  index_t heads = 0;          ///< num_attention_heads
  index_t kv_heads = 0;       ///< num_key_value_heads
  index_t dim = 0;            ///< head_dim
  index_t vocab = 0;          ///< vocab_size
  index_t max_positions = 0;  ///< max_position_embeddings; 0: not said
  float norm_epsilon = 0;     ///< rms_norm_eps
  bool tied = false;          ///< tie_word_embeddings: logits from the embedding matrix
  bool qkv_bias = false;      ///< biases on the q, k and v projections
  bool o_bias = false;        ///< a bias on the output projection
  kvmeld::rotary rope = kvmeld::rotary::halves(10'000);  ///< rope_theta, rope_scaling

  index_t group() const { return heads / kv_heads; }
  /// What every layer's attention computes, or `of` of its KV heads.
  kvmeld::attention_spec attention(index_t of = 0) const {
    return {.kv_heads = of > 0 ? of : kv_heads, .group = group(), .key_dim = dim, .rope = rope};
  }

  static config read(const std::filesystem::path& file) { return parse(read_file(file), file); }
  /// What is in `file`.
  static config parse(std::string_view text, const std::filesystem::path& file);
};

}  // namespace engine
