// SPDX-License-Identifier: MIT
/// A model and its tokens, from a Hugging Face folder or a GGUF file.
#pragma once

#include <filesystem>

#include "engine/decoder.hpp"
#include "engine/tokenizer.hpp"

namespace engine {

struct model {
  decoder network;
  tokenizer tokens;

  /// A folder (`config.json`, safetensors, `tokenizer.model`), or a file, which is read as GGUF.
  static model load(const std::filesystem::path& path);
};

}  // namespace engine
