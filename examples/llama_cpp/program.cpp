// SPDX-License-Identifier: MIT
#include "llama_cpp/program.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <sstream>

#include "evaluate/options.hpp"
#include "evaluate/policies.hpp"
#include "evaluate/progress.hpp"
#include "llama_cpp/draft.hpp"
#include "llama_cpp/vocabulary.hpp"

namespace kvmeld::llama {

using evaluate::detail::require;

program_options program_options::parse(int count, const char* const* arguments) {
  program_options o;
  CLI::App app("Runs a GGUF model with its KV cache compressed by kvmeld.", "kvmeld-llama");
  app.footer(
      "A model with windowed layers: `bash .ci/models.sh gemma3` fetches Gemma 3 270M (253 MB).\n"
      "Gemma is provided under and subject to the Gemma Terms of Use found at\n"
      "ai.google.dev/gemma/terms.");
  app.option_defaults()->take_last()->always_capture_default();
  app.add_option("--model", o.model, "GGUF file")->required();
  app.add_option("--prompt-file", o.prompt_file, "text to read")->required();
  app.add_option("--policy", o.policy, "name[:parameter=value,...]");
  app.add_option(
      "--budget", o.budget,
      "slots per head; under fold and kvmerger on average, divided over the model by scores");
  app.add_flag("--equal", o.equal, "under fold and kvmerger too the same budget for every head");
  app.add_option("--trigger", o.trigger,
                 "return to an equal budget at so many slots; 0: never hold more than the budget");
  app.add_option("--room", o.room, "slots beside the budget that the tokens written may fill");
  app.add_option("--pin", o.pin,
                 "first tokens of the prompt that stay in every head, as a system prompt");
  app.add_option("--mode", o.mode,
                 "own (kvmeld's attention) or repack (the engine's, in the longest head's cells)");
  app.add_option("--predict", o.predict, "tokens to write, or fewer: the text may end before");
  app.add_option("--draft", o.draft,
                 "tokens guessed from the text and decoded together (mode own); what is written "
                 "stays the same");
  app.add_flag("--perplexity", o.perplexity,
               "nats per token of the prompt, compressed after every chunk");
  app.add_option(
      "--chunk", o.chunk,
      "tokens of the prompt that are compressed together; 0: all, under equal budgets 256");
  app.add_option("--cells", o.cells, "of the engine (n_ctx); 0: what budget and chunk need");
  app.add_option("--cache-type", o.cache_type, "f16, f32, or in mode own q8_0");
  app.add_option("--untouched", o.untouched, "layers that keep all")->delimiter(',');
  app.add_option("--threads", o.threads, "llama.cpp's");
  app.add_flag("--alone", o.alone, "no run with the full cache to compare with");
  try {
    app.parse(count, arguments);
  } catch (const CLI::CallForHelp&) {
    throw evaluate::help_request{app.help()};
  } catch (const CLI::Error& e) {
    throw evaluate::usage_error(e.what());
  }
  require(o.mode == "repack" || o.mode == "own",
          "--mode: expected repack or own, got '" + o.mode + "'");
  require(
      o.cache_type == "f16" || o.cache_type == "f32" || (o.cache_type == "q8_0" && o.mode == "own"),
      "--cache-type: expected f16 or f32 (in mode own q8_0 too), got '" + o.cache_type + "'");
  for (const auto& [name, value, least] : {std::tuple{"--budget", o.budget, 1},
                                           {"--trigger", o.trigger, 0},
                                           {"--room", o.room, 0},
                                           {"--predict", o.predict, 0},
                                           {"--draft", o.draft, 0},
                                           {"--chunk", o.chunk, 0},
                                           {"--pin", o.pin, 0},
                                           {"--cells", o.cells, 0},
                                           {"--threads", o.threads, 1}}) {
    require(value >= least && value <= 1 << 24,
            fmt::format("{}: expected {} to {}, got {}", name, least, 1 << 24, value));
  }
  require(o.draft == 0 || o.mode == "own",
          "--draft: expected --mode own with it, got --mode " + o.mode);
  expect_plain("--policy", o.policy);
  const auto named = evaluate::detail::parse_policy(o.policy);
  require(o.draft == 0 || kvmeld::declared(named.policy).supports_decode(),
          "--draft: expected a policy that decodes with it, got --policy " + o.policy);
  require(o.trigger == 0 || !budget_of(named.policy, o.budget, o.equal).is_shared,
          "--trigger: expected --equal with it (heads that share a budget have triggers of their "
          "own), got --policy " +
              o.policy);
  return o;
}

namespace {

/// One of the two runs.
struct measured {
  double prompt_seconds = 0, predict_seconds = 0, nats = 0;
  report held = {};
  index_t cells = 0;  // of the engine, used or not
  std::vector<int> written = {};
  std::size_t guessed = 0, right = 0;  // drafted tokens
};

ggml_type type_of(const std::string& cache_type) {
  return cache_type == "f16" ? GGML_TYPE_F16 : cache_type == "f32" ? GGML_TYPE_F32 : GGML_TYPE_Q8_0;
}

/// Reads the prompt and goes on: with `given` tokens where there are any, else with the likeliest
/// until one ends the text.
measured measure(session& s, const program_options& o, const std::vector<int>& prompt,
                 const vocabulary& language, const std::vector<int>* given, evaluate::progress& bar,
                 const std::string& stage, std::ostream* out) {
  measured m;
  std::vector<float> last;
  const auto chunk = static_cast<std::size_t>(o.chunk);
  bar.stage(stage, static_cast<double>(prompt.size()));
  {
    const stopwatch timed(m.prompt_seconds);
    std::size_t seen = 0;
    for (std::size_t at = 0; at < prompt.size(); at += chunk) {
      const auto part = std::span(prompt).subspan(at, std::min(chunk, prompt.size() - at));
      s.read(part, o.perplexity, [&](std::size_t i, std::span<const float> logits) {
        if (o.perplexity && at + i + 1 < prompt.size()) {
          m.nats += surprise(logits, prompt[at + i + 1]);
        }
        last.assign(logits.begin(), logits.end());
        bar.add(static_cast<double>(at + i + 1 - std::exchange(seen, at + i + 1)) /
                static_cast<double>(prompt.size()));
      });
    }
  }
  const auto most = given != nullptr ? given->size() : static_cast<std::size_t>(o.predict);
  bar.stage(stage + ", writing", static_cast<double>(most));
  if (out != nullptr) {
    bar.clear();
  }
  {
    const stopwatch timed(m.predict_seconds);
    std::vector<int> text = prompt;
    while (m.written.size() < most) {
      const std::size_t first = m.written.size();
      std::vector<int> tokens = {given != nullptr ? (*given)[first] : likeliest(last)};
      if (language.ends(tokens[0])) {
        break;
      }
      text.push_back(tokens[0]);
      if (given == nullptr && o.draft > 0) {
        const auto guesses = look_up(
            text, std::min({o.draft, s.draft_room() - 1, static_cast<index_t>(most - first) - 1}));
        std::ranges::copy_if(guesses, std::back_inserter(tokens), [&, on = true](int t) mutable {
          return on = on && !language.ends(t);
        });
      }
      const auto [kept, logits] =
          tokens.size() > 1 ? s.draft(tokens) : std::pair(std::size_t{1}, s.next(tokens[0]));
      last.assign(logits.begin(), logits.end());
      m.guessed += tokens.size() - 1, m.right += kept - 1;
      text.insert(text.end(), tokens.begin() + 1,
                  tokens.begin() + static_cast<std::ptrdiff_t>(kept));
      for (std::size_t i = 0; i < kept; ++i) {
        m.written.push_back(tokens[i]);
        if (out != nullptr) {
          *out << language.write(tokens[i]) << std::flush;
        } else {
          bar.add(1.0 / static_cast<double>(most));
        }
      }
    }
  }
  m.held = s.report().value_or(report{});
  m.cells = s.cells();
  return m;
}

std::string rate(double tokens, double seconds) {
  return tokens > 0 && seconds > 0 ? fmt::format("{:.0f}", tokens / seconds) : "–";
}

}  // namespace

int run(program_options o, std::ostream& out, std::ostream& progress) {
  const auto model = load_model(o.model);
  const vocabulary language(model.get());
  std::ifstream in(o.prompt_file, std::ios::binary);
  require(in.good(), "--prompt-file: expected a file, got '" + o.prompt_file + "'");
  std::ostringstream text;
  text << in.rdbuf();
  const std::vector<int> prompt = language.read(text.str());
  require(prompt.size() > 1,
          "--prompt-file: expected at least 2 tokens, got " + std::to_string(prompt.size()));
  const auto named = evaluate::detail::parse_policy(o.policy);
  budget limit = budget_of(named.policy, o.budget, o.equal);
  limit.trigger = o.trigger;
  limit.slack = o.room;
  const auto read_all = static_cast<index_t>(prompt.size()), all = read_all + o.predict;
  o.chunk = o.chunk > 0 ? o.chunk : limit.is_shared ? read_all : 256;
  // Equal budgets end a prompt with every micro-batch, shared ones with a chunk of several.
  const index_t batch = limit.is_shared ? std::min(o.chunk, 256) : o.chunk;
  const bool own = o.mode == "own", bounded = kvmeld::declared(named.policy).evicts() &&
                                              kvmeld::declared(named.policy).supports_decode() &&
                                              o.untouched.empty() && !limit.is_shared;
  const index_t most = std::max(all, o.budget + o.room + 1),
                recent = std::max(1, llama_model_n_swa(model.get()));
  const index_t cells =
      o.cells > 0 ? o.cells
      : own       ? batch + recent
      : bounded   ? std::max({limit.trigger_length() - 1, o.budget + o.room, recent}) + batch
                  : most;
  const ggml_type rows = type_of(o.cache_type);
  session compressed(model.get(), parameters_of(cells, batch, rows, o.threads),
                     compression{named.policy,
                                 {.how = own ? mode::own_attention : mode::repack,
                                  .limits = {limit},
                                  .untouched = o.untouched,
                                  .capacity = own ? most : 0}});
  compressed.pin(0, o.pin);
  evaluate::progress bar(progress, isatty(STDERR_FILENO) != 0);
  bar.expect((o.alone ? 1.0 : 2.0) * all);
  const measured mine = measure(compressed, o, prompt, language, nullptr, bar, o.policy, &out);
  measured full;
  if (!o.alone) {
    session uncompressed(model.get(), parameters_of(all, batch, rows, o.threads));
    full = measure(uncompressed, o, prompt, language, &mine.written, bar, "full cache", nullptr);
  }
  bar.clear();
  const auto kib = [](auto bytes) {
    return fmt::format("{:.0f}", static_cast<double>(bytes) / 1024);
  };
  const auto line = [&](const char* what, const std::string& a, const std::string& b) {
    out << (o.alone ? fmt::format("{:<26}{:>16}\n", what, b)
                    : fmt::format("{:<26}{:>12}{:>16}\n", what, a, b));
  };
  const double read = static_cast<double>(prompt.size()),
               written = static_cast<double>(mine.written.size());
  const std::string whole = std::to_string(prompt.size() + mine.written.size());
  out << "\n\n";
  line("", "full cache", o.policy.substr(0, o.policy.find(':')) + ", " + o.mode);
  line("tokens", whole, std::to_string(mine.held.tokens));
  line("cells in use", whole, std::to_string(mine.held.cells));
  line("slots of the longest head", whole, std::to_string(mine.held.slots));
  line("KV held, KiB", kib(mine.held.full_bytes), kib(mine.held.bytes));
  line("KV reserved, KiB",
       kib(static_cast<double>(mine.held.full_bytes) * full.cells /
           static_cast<double>(mine.held.tokens)),
       kib(mine.held.reserved_bytes));
  line("prompt, tokens/s", rate(read, full.prompt_seconds), rate(read, mine.prompt_seconds));
  line("writing, tokens/s", rate(written, full.predict_seconds),
       rate(written, mine.predict_seconds));
  if (o.draft > 0) {
    line("guessed tokens right", "–", fmt::format("{} of {}", mine.right, mine.guessed));
  }
  if (o.perplexity) {
    line("nll, nats/token", fmt::format("{:.4f}", full.nats / (read - 1)),
         fmt::format("{:.4f}", mine.nats / (read - 1)));
  }
  const double seconds = mine.prompt_seconds + mine.predict_seconds;
  for (const auto& [what, spent] : {std::pair{"log-mass and queries, %", mine.held.spent.logits},
                                    {"probabilities, %", mine.held.spent.observe},
                                    {"own attention, %", mine.held.spent.attend},
                                    {"compression, %", mine.held.spent.compress}}) {
    line(what, "–", fmt::format("{:.1f}", 100 * spent / seconds));
  }
  return 0;
}

}  // namespace kvmeld::llama
