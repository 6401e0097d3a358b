// SPDX-License-Identifier: MIT
/// GGUF files of the llama family, read by ggml and libllama.
#pragma once

#include <filesystem>

#include "engine/model.hpp"

namespace engine {

/// Weights dequantised by ggml's own functions, tokens by libllama's vocabulary. Architectures
/// `llama` and `qwen2`, with RoPE of a base or Llama 3's; what else a file holds is refused. A
/// build without libllama refuses every file.
model load_gguf(const std::filesystem::path& file);

}  // namespace engine
