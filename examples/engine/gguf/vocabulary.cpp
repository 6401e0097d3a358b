// SPDX-License-Identifier: MIT
#include <llama-cpp.h>

#include <algorithm>  // std::max
#include <array>
#include <cstring>  // std::strcpy

#include "engine/gguf/file.hpp"

namespace engine::gguf {

namespace {

llama_model_ptr load(const std::filesystem::path& file, const llama_model_kv_override* changed) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  auto parameters = llama_model_default_params();
  parameters.vocab_only = true;
  parameters.n_gpu_layers = 0;
  parameters.kv_overrides = changed;
  llama_model_ptr model(llama_model_load_from_file(file.string().c_str(), parameters));
  if (!model) {
    throw format_error(file, "expected a vocabulary that libllama reads");
  }
  return model;
}

/// `special`: names of control tokens stand for these.
std::vector<int> tokenize(const llama_vocab* vocab, std::string_view text, bool special) {
  std::vector<int> tokens(text.size() + 8);
  const int n = llama_tokenize(vocab, text.data(), static_cast<int>(text.size()), tokens.data(),
                               static_cast<int>(tokens.size()), false, special);
  expects(n >= 0, "encode: expected at most ", tokens.size(), " tokens, got ", -n);
  tokens.resize(as_size(n));
  return tokens;
}

class vocabulary : public text_codec {
 public:
  explicit vocabulary(const std::filesystem::path& file) : whole_(load(file, nullptr)) {
    if (llama_vocab_type(of(whole_)) == LLAMA_VOCAB_TYPE_SPM) {
      std::array<llama_model_kv_override, 2> changed = {};  // ends with an empty key
      changed[0].tag = LLAMA_KV_OVERRIDE_TYPE_BOOL;
      std::strcpy(changed[0].key, "tokenizer.ggml.add_space_prefix");
      changed[0].val_bool = false;
      fragment_ = load(file, changed.data());
    }
  }

  index_t size() const override { return llama_vocab_n_tokens(of(whole_)); }
  std::vector<int> encode(std::string_view text, bool fragment) const override {
    return tokenize(of(fragment && fragment_ ? fragment_ : whole_), text, false);
  }

  std::string decode(std::span<const int> tokens) const override {
    std::string text;
    std::string piece(64, '\0');
    for (const int token : tokens) {
      const auto write = [&] {
        return llama_token_to_piece(of(whole_), token, piece.data(), static_cast<int>(piece.size()),
                                    0, false);
      };
      int n = write();
      if (n < 0) {
        piece.resize(as_size(-n));
        n = write();
      }
      text.append(piece, 0, as_size(std::max(n, 0)));
    }
    return text;
  }

  std::optional<chat_turn> chat() const override {
    const char* const form = llama_model_chat_template(whole_.get(), nullptr);
    if (form == nullptr) {
      return {};
    }
    constexpr std::string_view said = "what is said";
    const llama_chat_message message{"user", said.data()};
    std::string text(1 << 14, '\0');
    const int n = llama_chat_apply_template(form, &message, 1, true, text.data(),
                                            static_cast<int>(text.size()));
    text.resize(n < 0 || n > static_cast<int>(text.size()) ? 0 : as_size(n));
    const auto at = text.find(said);
    if (at == std::string::npos) {
      return {};
    }
    const auto tokens = [&](const std::string& part) {
      return tokenize(of(fragment_ ? fragment_ : whole_), part, true);
    };
    return chat_turn{tokens(text.substr(0, at)), tokens(text.substr(at + said.size()))};
  }

  std::optional<int> begin() const override {
    const llama_vocab* const vocab = of(whole_);
    return llama_vocab_get_add_bos(vocab) ? std::optional(llama_vocab_bos(vocab)) : std::nullopt;
  }

  /// Has the file one? A model of bytes has none.
  bool is_there() const { return llama_vocab_type(of(whole_)) != LLAMA_VOCAB_TYPE_NONE; }

 private:
  static const llama_vocab* of(const llama_model_ptr& model) {
    return llama_model_get_vocab(model.get());
  }

  llama_model_ptr whole_, fragment_;  // null: whole texts and fragments are read alike
};

}  // namespace

std::unique_ptr<const text_codec> vocabulary_of(const std::filesystem::path& file) {
  auto found = std::make_unique<vocabulary>(file);
  return found->is_there() ? std::move(found) : nullptr;
}

}  // namespace engine::gguf
