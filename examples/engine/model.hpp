// SPDX-License-Identifier: MIT
/// A model and its tokens, from a Hugging Face folder or a GGUF file.
#pragma once

#include <filesystem>

#include "engine/decoder.hpp"
#include "engine/tokenizer.hpp"

namespace engine {

struct model;

/// Weights dequantised by ggml's own functions, tokens by libllama's vocabulary. Architectures
/// `llama`, `qwen2`, `qwen3`, `gemma2` and `gemma3`, with RoPE of a base or Llama 3's; what else a
/// file holds is refused. A build without libllama refuses every file.
model load_gguf(const std::filesystem::path& file);

struct model {
  decoder network;
  tokenizer tokens;

  /// A folder (`config.json`, safetensors, `tokenizer.model`), or a file, which is read as GGUF.
  static model load(const std::filesystem::path& path) {
    if (!std::filesystem::is_directory(path)) {
      return load_gguf(path);
    }
    auto network = decoder::load(path);
    auto tokens = tokenizer::load(path, network.shape().vocab);
    return {std::move(network), std::move(tokens)};
  }
};

}  // namespace engine
