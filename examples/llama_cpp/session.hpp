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

#include "evaluate/needle.hpp"
#include "evaluate/nll.hpp"
#include "evaluate/policies.hpp"
#include "llama_cpp/llama_cpp.hpp"

namespace kvmeld::llama {

extern template class compressor<evaluate::any_policy>;  // compressor.cpp compiles it

/// Refused: the name of a policy with a division of budgets or a source of queries.
inline void expect_plain(const std::string& option, const std::string& name) {
  evaluate::detail::require(
      name.find_first_of("+@") == std::string::npos,
      option + ": expected a name and parameters (budgets and queries are the adapter's), got '" +
          name + "'");
}

/// The budget of `slots` a head: shared by all heads of the model where the policy divides them
/// (`fold`, `kvmerger`), unless they are to be equal.
inline budget budget_of(const evaluate::any_policy& policy, index_t slots, bool equal) {
  const bool shares = policy.visit([](const auto& p) {
    return requires { p.sharing(index_t{}, index_t{}); };
  });
  return shares && !equal ? budget::shared(slots) : budget{.slots = slots};
}

/// Logits as `evaluate` takes them, `[1, vocab]`.
inline auto row_of(std::span<const float> logits) {
  return Eigen::Map<const engine::row_vector>(logits.data(),
                                              static_cast<Eigen::Index>(logits.size()));
}
/// Nats that `token` costs.
inline double surprise(std::span<const float> logits, int token) {
  return evaluate::surprise(row_of(logits), token);
}
inline int likeliest(std::span<const float> logits) { return evaluate::likeliest(row_of(logits)); }

struct compression {
  evaluate::any_policy policy;
  kvmeld::llama::options how;
};

/// One sequence in a context of its own.
class session {
 public:
  session(llama_model* model, llama_context_params parameters,
          const std::optional<compression>& by = {})
      : vocab_(llama_vocab_n_tokens(llama_model_get_vocab(model))) {
    if (by) {
      compressor_ = std::make_unique<compressor<evaluate::any_policy>>(model, by->policy, by->how);
      compressor_->attach(parameters);
    }
    context_.reset(llama_init_from_model(model, parameters));
    if (!context_) {
      throw std::runtime_error("llama.cpp could not make a context");
    }
    // It takes no more at once than n_ctx, and stops the program where more comes.
    chunk_ = static_cast<index_t>(llama_n_ubatch(context_.get()));
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

  /// Tokens of the text that stay, from `first` on, before they are read.
  void pin(index_t first, index_t count) { compressor_->pin(first, count); }

  /// Reads `tokens` in micro-batches; `see(i, logits [vocab])` for each of them, or for the last of
  /// each micro-batch alone. Several are a prompt, which has ended then.
  template <class See>
  void read(std::span<const int> tokens, bool all, See see) {
    for (std::size_t at = 0; at < tokens.size();) {
      const auto part =
          tokens.subspan(at, std::min(static_cast<std::size_t>(chunk_), tokens.size() - at));
      // Without positions and sequences: the next ones of the first sequence. It writes no tokens.
      llama_batch batch =
          llama_batch_get_one(const_cast<int*>(part.data()), static_cast<int>(part.size()));
      std::vector<std::int8_t> logits(part.size(), 1);
      batch.logits = all ? logits.data() : nullptr;
      decode(batch);
      position_ += static_cast<index_t>(part.size());
      for (std::size_t i = all ? 0 : part.size() - 1; i < part.size(); ++i) {
        see(at + i, logits_of(i));
      }
      at += part.size();
    }
    if (compressor_ && tokens.size() > 1) {
      compressor_->end_prompt();
    }
  }
  /// One token; the next one's logits.
  std::span<const float> next(int token) {
    std::span<const float> logits;
    read(std::span(&token, 1), false, [&](std::size_t, auto l) { logits = l; });
    return logits;
  }

  /// Tokens that a draft may have with which tokens are chosen as without it.
  index_t draft_room() { return compressor_->draft_room(); }
  /// The next token and guesses at those after it, decoded together under compression: how many of
  /// them stay, which are those that the model would have chosen, and the logits after them.
  std::pair<std::size_t, std::span<const float>> draft(std::vector<int> tokens) {
    llama_batch batch = llama_batch_get_one(tokens.data(), static_cast<int>(tokens.size()));
    std::vector<std::int8_t> logits(tokens.size(), 1);
    batch.logits = logits.data();
    compressor_->announce(batch, true);
    decode(batch);
    std::size_t kept = 1;
    while (kept < tokens.size() && likeliest(logits_of(kept - 1)) == tokens[kept]) {
      ++kept;
    }
    position_ += static_cast<index_t>(kept);
    llama_memory_seq_rm(llama_get_memory(context_.get()), 0, position_, -1);
    compressor_->accept();
    return {kept, logits_of(kept - 1)};
  }

  index_t position() const { return position_; }
  /// That the engine has reserved.
  index_t cells() const { return static_cast<index_t>(llama_n_ctx(context_.get())); }
  std::optional<kvmeld::llama::report> report() {
    return compressor_ ? std::optional(compressor_->report()) : std::nullopt;
  }

 private:
  void decode(const llama_batch& batch) {
    const int code = llama_decode(context_.get(), batch);
    if (compressor_) {
      compressor_->check();
    }
    if (code != 0) {
      throw std::runtime_error(code == 1 ? "llama.cpp: expected free cells: give a larger --cells"
                                         : "llama_decode failed: " + std::to_string(code));
    }
  }
  std::span<const float> logits_of(std::size_t i) {
    return {llama_get_logits_ith(context_.get(), static_cast<int>(i)),
            static_cast<std::size_t>(vocab_)};
  }

  int vocab_;
  index_t chunk_ = 0, position_ = 0;
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

/// A context of so many cells, for so many tokens at once.
inline llama_context_params parameters_of(index_t cells, index_t chunk, ggml_type rows,
                                          index_t threads) {
  auto p = llama_context_default_params();
  p.n_ctx = static_cast<std::uint32_t>(cells);
  p.n_batch = p.n_ubatch = static_cast<std::uint32_t>(chunk);
  p.type_k = p.type_v = rows;
  p.n_threads = p.n_threads_batch = threads;
  return p;
}

}  // namespace kvmeld::llama
