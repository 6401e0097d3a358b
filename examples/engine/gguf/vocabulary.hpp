// SPDX-License-Identifier: MIT
/// The vocabulary of a GGUF file, by libllama.
#pragma once

#include <llama-cpp.h>

#include <filesystem>

#include "engine/tokenizer.hpp"

namespace engine::gguf {

class vocabulary : public text_codec {
 public:
  explicit vocabulary(const std::filesystem::path& file);

  index_t size() const override { return llama_vocab_n_tokens(of(whole_)); }
  std::vector<int> encode(std::string_view text, bool fragment) const override;
  std::string decode(std::span<const int> tokens) const override;
  std::optional<chat_turn> chat() const override;

  /// Has the file one? A model of bytes has none.
  bool is_there() const { return llama_vocab_type(of(whole_)) != LLAMA_VOCAB_TYPE_NONE; }

 private:
  static const llama_vocab* of(const llama_model_ptr& model) {
    return llama_model_get_vocab(model.get());
  }

  llama_model_ptr whole_, fragment_;  // null: whole texts and fragments are read alike
};

}  // namespace engine::gguf
