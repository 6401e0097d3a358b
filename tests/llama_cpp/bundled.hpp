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

/// The bundled model, in which `token` ends a text.
inline void write_ending(const std::filesystem::path& path, int token) {
  ggml_context* tensors = nullptr;
  gguf_context* const file =
      gguf_init_from_file(paths::gguf().c_str(), {.no_alloc = false, .ctx = &tensors});
  REQUIRE(file != nullptr);
  gguf_set_val_u32(file, "tokenizer.ggml.eos_token_id", static_cast<std::uint32_t>(token));
  gguf_context* const out = gguf_init_empty();
  gguf_set_kv(out, file);
  for (ggml_tensor* t = ggml_get_first_tensor(tensors); t != nullptr;
       t = ggml_get_next_tensor(tensors, t)) {
    if (gguf_find_tensor(file, t->name) >= 0) {  // not the block that holds their data
      gguf_add_tensor(out, t);
    }
  }
  gguf_write_to_file(out, path.string().c_str(), false);
  gguf_free(out);
  gguf_free(file);
  ggml_free(tensors);
}

}  // namespace test
