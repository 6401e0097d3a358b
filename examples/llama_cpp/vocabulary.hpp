// SPDX-License-Identifier: MIT
/// Text and tokens, by a GGUF's own vocabulary.
#pragma once

#include <llama.h>

#include <string>
#include <vector>

#include "evaluate/policies.hpp"

namespace kvmeld::llama {

/// A vocabulary of `none` reads and writes bytes, if it has 256 of them.
class vocabulary {
 public:
  explicit vocabulary(const llama_model* model)
      : vocab_(llama_model_get_vocab(model)),
        bytes_(llama_vocab_type(vocab_) == LLAMA_VOCAB_TYPE_NONE) {
    if (bytes_ && llama_vocab_n_tokens(vocab_) != 256) {
      throw evaluate::usage_error(
          "--model: expected a vocabulary, or 256 tokens (bytes) without one");
    }
  }

  std::vector<int> read(const std::string& text) const {
    if (bytes_) {
      std::vector<int> tokens;
      for (const char c : text) {
        tokens.push_back(static_cast<unsigned char>(c));
      }
      return tokens;
    }
    std::vector<int> tokens(text.size() + 8);
    const auto size = [](const auto& of) { return static_cast<int>(of.size()); };
    const int n =
        llama_tokenize(vocab_, text.data(), size(text), tokens.data(), size(tokens), true, false);
    if (n < 0) {
      throw evaluate::usage_error("--prompt-file: expected a text that llama.cpp tokenises");
    }
    tokens.resize(static_cast<std::size_t>(n));
    return tokens;
  }
  std::string write(int token) const {
    if (bytes_) {
      return {static_cast<char>(token)};
    }
    std::string piece(64, '\0');
    int n = llama_token_to_piece(vocab_, token, piece.data(), 64, 0, false);
    if (n < 0) {
      piece.resize(static_cast<std::size_t>(-n));
      n = llama_token_to_piece(vocab_, token, piece.data(), -n, 0, false);
    }
    piece.resize(static_cast<std::size_t>(std::max(n, 0)));
    return piece;
  }
  bool ends(int token) const { return llama_vocab_is_eog(vocab_, token); }

 private:
  const llama_vocab* vocab_;
  bool bytes_;
};

}  // namespace kvmeld::llama
