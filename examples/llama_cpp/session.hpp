// SPDX-License-Identifier: MIT
/// A text through llama.cpp, chunk by chunk, with the adapter or with the full cache.
#pragma once

#include <llama-cpp.h>

#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "llama_cpp/compressor.hpp"

namespace kvmeld::llama {

/// A batch's memory.
class batch {
 public:
  explicit batch(index_t tokens) : data_(llama_batch_init(tokens, 0, 1)) {}
  ~batch() { llama_batch_free(data_); }
  batch(const batch&) = delete;
  batch& operator=(const batch&) = delete;

  /// Tokens at positions `first` and on; logits of all of them, or of the last alone.
  llama_batch& fill(std::span<const int> tokens, index_t first, bool all) {
    data_.n_tokens = static_cast<int>(tokens.size());
    for (int i = 0; i < data_.n_tokens; ++i) {
      data_.token[i] = tokens[static_cast<std::size_t>(i)];
      data_.pos[i] = first + i;
      data_.n_seq_id[i] = 1;
      data_.seq_id[i][0] = 0;
      data_.logits[i] = all || i + 1 == data_.n_tokens ? 1 : 0;
    }
    return data_;
  }

 private:
  llama_batch data_;
};

struct compression {
  evaluate::any_policy policy;
  kvmeld::llama::options how;
};

/// One sequence in a context of its own.
class session {
 public:
  session(llama_model* model, llama_context_params parameters,
          const std::optional<compression>& by = {})
      : vocab_(llama_vocab_n_tokens(llama_model_get_vocab(model))),
        chunk_(static_cast<index_t>(std::min(parameters.n_batch, parameters.n_ubatch))),
        batch_(chunk_) {
    if (by) {
      compressor_ = std::make_unique<compressor<evaluate::any_policy>>(model, by->policy, by->how);
      compressor_->attach(parameters);
    }
    context_.reset(llama_init_from_model(model, parameters));
    if (!context_) {
      throw std::runtime_error("llama.cpp could not make a context");
    }
    // It takes no more at once than n_ctx, and stops the program where more comes.
    chunk_ = std::min(chunk_, static_cast<index_t>(llama_n_ubatch(context_.get())));
    if (compressor_) {
      compressor_->bind(context_.get());
    }
  }

  /// Back to the beginning, for another text.
  void clear() {
    llama_memory_clear(llama_get_memory(context_.get()), false);
    if (compressor_) {
      compressor_->reset();
    }
    position_ = 0;
  }

  /// Reads `tokens` in chunks; `see(i, logits [vocab])` for each of them, or for the last alone.
  template <class See>
  void read(std::span<const int> tokens, bool all, See see) {
    for (std::size_t at = 0; at < tokens.size();) {
      const auto part =
          tokens.subspan(at, std::min(static_cast<std::size_t>(chunk_), tokens.size() - at));
      const int code = llama_decode(context_.get(), batch_.fill(part, position_, all));
      if (compressor_) {
        compressor_->check();
      }
      if (code != 0) {
        throw std::runtime_error(code == 1 ? "llama.cpp: expected free cells: give a larger --cells"
                                           : "llama_decode failed: " + std::to_string(code));
      }
      position_ += static_cast<index_t>(part.size());
      for (std::size_t i = all ? 0 : part.size() - 1; i < part.size(); ++i) {
        see(at + i,
            std::span<const float>(llama_get_logits_ith(context_.get(), static_cast<int>(i)),
                                   static_cast<std::size_t>(vocab_)));
      }
      at += part.size();
    }
  }
  /// One token; the next one's logits.
  std::span<const float> next(int token) {
    std::span<const float> logits;
    read(std::span(&token, 1), false, [&](std::size_t, auto l) { logits = l; });
    return logits;
  }

  index_t position() const { return position_; }
  /// That the engine has reserved.
  index_t cells() const { return static_cast<index_t>(llama_n_ctx(context_.get())); }
  std::optional<kvmeld::llama::report> report() {
    return compressor_ ? std::optional(compressor_->report()) : std::nullopt;
  }

 private:
  int vocab_;
  index_t chunk_, position_ = 0;
  batch batch_;
  std::unique_ptr<compressor<evaluate::any_policy>> compressor_;
  llama_context_ptr context_;  // goes first: it calls the compressor
};

/// A model on the processor, with llama.cpp's own words kept to errors.
inline llama_model_ptr load_model(const std::string& file) {
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) {
          std::fputs(text, stderr);
        }
      },
      nullptr);
  auto parameters = llama_model_default_params();
  parameters.n_gpu_layers = 0;
  llama_model_ptr model(llama_model_load_from_file(file.c_str(), parameters));
  if (!model) {
    throw std::runtime_error("--model: expected a GGUF file that llama.cpp loads, got '" + file +
                             "'");
  }
  return model;
}

/// Nats that `token` costs.
inline double surprise(std::span<const float> logits, int token) {
  const double most = *std::ranges::max_element(logits);
  double sum = 0;
  for (const float l : logits) {
    sum += std::exp(double{l} - most);
  }
  return std::log(sum) + most - double{logits[static_cast<std::size_t>(token)]};
}

inline int likeliest(std::span<const float> logits) {
  return static_cast<int>(std::ranges::max_element(logits) - logits.begin());
}

}  // namespace kvmeld::llama
