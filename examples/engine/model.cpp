// SPDX-License-Identifier: MIT
#include "engine/model.hpp"

namespace engine {

model model::load(const std::filesystem::path& path) {
  if (!std::filesystem::is_directory(path)) {
    return load_gguf(path);
  }
  auto network = decoder::load(path);
  auto tokens = tokenizer::load(path, network.shape().vocab);
  return {std::move(network), std::move(tokens)};
}

}  // namespace engine
