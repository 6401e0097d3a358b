// SPDX-License-Identifier: MIT
// The bundled model in both engines, with its tokens and its held-out text.
#pragma once

#include <catch2/catch.hpp>

#include "engine/tokenizer.hpp"
#include "llama_cpp/files.hpp"
#include "support/paths.hpp"

namespace test {

struct bundled {
  engine::decoder ours = engine::decoder::load(folder());
  engine::tokenizer tokens = engine::tokenizer::load(folder(), ours.shape().vocab);
  llama_model_ptr theirs = load_gguf(paths::gguf());

  static std::filesystem::path folder() {
    return std::filesystem::path(paths::models()) / "kvmeld-2m";
  }
  static std::filesystem::path text_file() {
    return std::filesystem::path(paths::models()) / "held-out.txt";
  }
  static std::string text() { return engine::read_file(text_file()); }
};

}  // namespace test
