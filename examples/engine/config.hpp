// SPDX-License-Identifier: MIT
/// A model's shape, read from Hugging Face's `config.json`.
#pragma once

#include <filesystem>
#include <string_view>
#include <vector>

#include "engine/error.hpp"
#include "kvmeld/config.hpp"
#include "kvmeld/memory/attention_spec.hpp"

namespace engine {

using kvmeld::index_t;

/// The MLP's activation: of Llama, and of Gemma (its tanh form).
enum class activation { silu, gelu };

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
  bool qk_norm = false;       ///< RMSNorm of each head's query and key before they are rotated
  bool post_norms = false;    ///< RMSNorm of what attention and MLP add (Gemma)
  activation mlp = activation::silu;
  float embedding_scale = 1;                             ///< of a token's embedding
  float logit_cap = 0;                                   ///< final_logit_softcapping; 0: none
  float soft_cap = 0;                                    ///< attn_logit_softcapping; 0: none
  kvmeld::rotary rope = kvmeld::rotary::halves(10'000);  ///< rope_theta, rope_scaling
  index_t window = 0;                                    ///< sliding_window; 0: all layers are full
  index_t full_every = 1;                                ///< every so many layers, the last is full
  kvmeld::rotary window_rope = {};                       ///< of the layers with a window

  index_t group() const { return heads / kv_heads; }
  bool windowed(index_t layer) const { return window > 0 && (layer + 1) % full_every != 0; }
  /// The layers whose attention sees all tokens, in their order: those that are compressed.
  std::vector<index_t> full_layers() const {
    std::vector<index_t> full;
    for (index_t layer = 0; layer < layers; ++layer) {
      if (!windowed(layer)) {
        full.push_back(layer);
      }
    }
    return full;
  }
  /// Their KV heads.
  index_t full_heads() const { return static_cast<index_t>(full_layers().size()) * kv_heads; }
  /// What a layer's attention computes, or `of` of its KV heads.
  kvmeld::attention_spec attention(index_t layer, index_t of = 0) const {
    const bool local = windowed(layer);
    return {.kv_heads = of > 0 ? of : kv_heads,
            .group = group(),
            .key_dim = dim,
            .rope = local ? window_rope : rope,
            .soft_cap = soft_cap,
            .window = local ? window : 0};
  }
  /// ... of every layer.
  std::vector<kvmeld::attention_spec> attention() const {
    std::vector<kvmeld::attention_spec> all;
    for (index_t layer = 0; layer < layers; ++layer) {
      all.push_back(attention(layer));
    }
    return all;
  }

  static config read(const std::filesystem::path& file) { return parse(read_file(file), file); }
  /// What is in `file`.
  static config parse(std::string_view text, const std::filesystem::path& file);
};

}  // namespace engine
