// SPDX-License-Identifier: MIT
/// kvmeld-llama-nodes FILE.gguf [PROMPT [STEPS [ROUNDS]]]: what asking for nodes costs llama.cpp,
/// as a Markdown table. Nothing is compressed, no tensor is read; one thread,
/// best of so many rounds.
#include <llama-cpp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>  // std::clock
#include <stdexcept>
#include <string_view>
#include <vector>

namespace {

/// Which nodes the callback asks for.
struct wish {
  const char* name;
  bool flash, callback;
  std::vector<std::string_view> prefixes;  ///< of names
  bool attention = false;                  ///< and flash attention's output
  double prompt = 0, steps = 0;            ///< tokens/s
  std::int64_t given = 0;                  ///< nodes, of the last step
};

bool on_node(ggml_tensor* t, bool ask, void* self) {
  auto& w = *static_cast<wish*>(self);
  const std::string_view name = t->name;
  const bool wanted =
      (w.attention && t->op == GGML_OP_FLASH_ATTN_EXT) ||
      std::ranges::any_of(w.prefixes, [&](std::string_view p) { return name.starts_with(p); });
  w.given += wanted && !ask ? 1 : 0;
  return !ask || wanted;
}

/// Of the processor's time: a machine may have other work.
double seconds_of(auto work) {
  const auto begin = std::clock();
  work();
  return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}

void measure(llama_model* model, wish& w, int prompt, int steps) {
  auto p = llama_context_default_params();
  p.n_ctx = static_cast<std::uint32_t>(prompt + steps);
  p.n_batch = p.n_ubatch = static_cast<std::uint32_t>(prompt);
  p.n_threads = p.n_threads_batch = 1;
  p.type_k = p.type_v = GGML_TYPE_F16;
  p.flash_attn_type = w.flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  if (w.callback) {
    p.cb_eval = on_node;
    p.cb_eval_user_data = &w;
  }
  const llama_context_ptr context(llama_init_from_model(model, p));
  if (!context) {
    throw std::runtime_error("llama.cpp could not make a context");
  }
  const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  std::vector<llama_token> tokens;
  for (int i = 0; i < prompt + steps; ++i) {
    tokens.push_back(i * 7919 % vocab);
  }
  const auto read = [&](int begin, int n) {
    if (llama_decode(context.get(), llama_batch_get_one(tokens.data() + begin, n)) != 0) {
      throw std::runtime_error("llama_decode failed");
    }
  };
  w.prompt = std::max(w.prompt, prompt / seconds_of([&] { read(0, prompt); }));
  const double rest = seconds_of([&] {
    for (int i = 0; i < steps; ++i) {
      w.given = 0;
      read(prompt + i, 1);
    }
  });
  w.steps = std::max(w.steps, steps / rest);
}

}  // namespace

int main(int count, char** arguments) try {
  if (count < 2) {
    throw std::runtime_error("kvmeld-llama-nodes FILE.gguf [PROMPT [STEPS [ROUNDS]]]");
  }
  const auto number = [&](int i, int otherwise) {
    return count > i ? std::max(1, std::atoi(arguments[i])) : otherwise;
  };
  const int prompt = number(2, 512), steps = number(3, 256), rounds = number(4, 5);
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  const llama_model_ptr model(
      llama_model_load_from_file(arguments[1], llama_model_default_params()));
  if (!model) {
    throw std::runtime_error("expected a GGUF file that llama.cpp loads");
  }
  std::vector<wish> wishes = {
      {"flash attention, no callback", true, false, {}},
      {"flash attention, a callback, `result_output`", true, true, {"result_output"}},
      {"flash attention, its output too (own attention)", true, true, {"result_output"}, true},
      {"no callback", false, false, {}},
      {"a callback, `result_output` (nothing)", false, true, {"result_output"}},
      {"`kq_soft_max-N` too (probabilities)", false, true, {"result_output", "kq_soft_max-"}},
      {"`kq-N` too (queries)", false, true, {"result_output", "kq-"}},
      {"both", false, true, {"result_output", "kq_soft_max-", "kq-"}},
  };
  for (int round = 0; round < rounds; ++round) {
    for (wish& w : wishes) {
      measure(model.get(), w, prompt, steps);
    }
  }
  std::printf("| asked for | nodes a step | prompt of %d, tokens/s | steps, tokens/s |\n", prompt);
  std::puts("|---|---|---|---|");
  for (const wish& w : wishes) {
    std::printf("| %s | %d | %.0f | %.0f |\n", w.name, static_cast<int>(w.given), w.prompt,
                w.steps);
  }
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
