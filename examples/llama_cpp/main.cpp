// SPDX-License-Identifier: MIT
/// The adapter in a program of one's own: a text that llama.cpp goes on with, over a compressed
/// cache.
///
///     kvmeld-llama model.gguf text.txt --budget 0.1
#include <llama-cpp.h>

#include <CLI/CLI.hpp>
#include <algorithm>  // std::max_element
#include <cstdio>
#include <cstdlib>  // std::abs
#include <fstream>
#include <iterator>  // std::istreambuf_iterator
#include <string>
#include <vector>

#include "evaluate/policies.hpp"
#include "llama_cpp/llama_cpp.hpp"

namespace kvmeld::llama {

extern template class compressor<evaluate::any_policy>;  // compressor.cpp compiles it

namespace {

/// A vocabulary of its own has a model; one of 256 tokens without one reads bytes.
std::vector<llama_token> tokens_of(const llama_vocab* vocab, const std::string& text) {
  std::vector<llama_token> tokens(text.size() + 8);
  int n = 0;
  if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
    for (const char c : text) {
      tokens[static_cast<std::size_t>(n++)] = static_cast<unsigned char>(c);
    }
  } else {
    n = llama_tokenize(vocab, text.data(), static_cast<int>(text.size()), tokens.data(),
                       static_cast<int>(tokens.size()), true, false);
  }
  expects(n > 1, "kvmeld-llama: expected a text of at least 2 tokens, got ", n);
  tokens.resize(static_cast<std::size_t>(n));
  return tokens;
}
void write(const llama_vocab* vocab, llama_token token) {
  std::string piece(1, static_cast<char>(token));
  if (llama_vocab_type(vocab) != LLAMA_VOCAB_TYPE_NONE) {
    const auto fill = [&] {
      return llama_token_to_piece(vocab, token, piece.data(), static_cast<int>(piece.size()), 0,
                                  false);
    };
    if (const int n = fill(); n != static_cast<int>(piece.size())) {  // below 0: so many are wanted
      piece.resize(static_cast<std::size_t>(std::abs(n)));
      fill();
    }
  }
  std::fwrite(piece.data(), 1, piece.size(), stdout);
  std::fflush(stdout);
}

void run(const std::string& file, const std::string& text, double share, int predict) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_model_params on_cpu = llama_model_default_params();
  on_cpu.n_gpu_layers = 0;
  const llama_model_ptr model(llama_model_load_from_file(file.c_str(), on_cpu));
  expects(model != nullptr, "kvmeld-llama: expected a model that llama.cpp loads, got ", file);
  const llama_vocab* const vocab = llama_model_get_vocab(model.get());
  std::vector<llama_token> tokens = tokens_of(vocab, text);
  const int all = static_cast<int>(tokens.size()) + predict, part = 256;

  compressor<evaluate::any_policy> kv(model.get(), fold{},
                                      {.how = mode::own_attention,
                                       .limits = {{.is_shared = true}},
                                       .capacity = all + 1,
                                       .share = share,
                                       .rows = make_storage("k6v4")});
  llama_context_params parameters = llama_context_default_params();
  parameters.n_batch = parameters.n_ubatch = part;
  parameters.n_ctx = static_cast<std::uint32_t>(part + std::max(1, llama_model_n_swa(model.get())));
  kv.attach(parameters);
  const llama_context_ptr context(llama_init_from_model(model.get(), parameters));
  expects(context != nullptr, "kvmeld-llama: expected a context, got none");
  kv.bind(context.get());

  const auto decode = [&](llama_token* first, int count) {
    const int code = llama_decode(context.get(), llama_batch_get_one(first, count));
    kv.check();  // throws what went wrong in it
    expects(code == 0, "kvmeld-llama: expected llama_decode to return 0, got ", code);
  };
  for (int at = 0; at < all - predict; at += part) {
    decode(tokens.data() + at, std::min(part, all - predict - at));
  }
  kv.end_prompt();  // the heads come to their shares of the budget
  for (int i = 0; i < predict; ++i) {
    const float* const logits = llama_get_logits_ith(context.get(), -1);
    auto next = static_cast<llama_token>(
        std::max_element(logits, logits + llama_vocab_n_tokens(vocab)) - logits);
    if (llama_vocab_is_eog(vocab, next)) {
      break;
    }
    write(vocab, next);
    decode(&next, 1);
  }
  const report held = kv.report();
  std::printf("\n\n%lld tokens, %d slots per head on average: %.0f of %.0f KiB held\n",
              static_cast<long long>(held.tokens), kv.slots(),
              static_cast<double>(held.bytes) / 1024, static_cast<double>(held.full_bytes) / 1024);
}

}  // namespace
}  // namespace kvmeld::llama

int main(int count, char** arguments) try {
  CLI::App app("Goes on with a text, over a KV cache compressed by fold.", "kvmeld-llama");
  std::string model, prompt;
  double share = 0.1;
  int predict = 64;
  app.option_defaults()->always_capture_default();
  app.add_option("model", model, "a GGUF file")->required()->check(CLI::ExistingFile);
  app.add_option("text", prompt, "a file")->required()->check(CLI::ExistingFile);
  app.add_option("--budget", share, "share of a 16-bit cache's bytes")
      ->check(CLI::Range(0.001, 1.0));
  app.add_option("--predict", predict, "tokens to write")->check(CLI::Range(1, 1 << 20));
  try {
    app.parse(count, arguments);
  } catch (const CLI::CallForHelp&) {
    std::printf("%s", app.help().c_str());
    return 0;
  } catch (const CLI::Error& e) {
    std::fprintf(stderr, "kvmeld-llama: %s\n", e.what());
    return 2;
  }
  std::ifstream in(prompt, std::ios::binary);
  kvmeld::llama::run(model, {std::istreambuf_iterator<char>(in), {}}, share, predict);
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
