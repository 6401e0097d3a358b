// SPDX-License-Identifier: MIT
#include "llama_cpp/tables.hpp"

#include <fmt/format.h>

#include "engine/error.hpp"
#include "engine/gguf/file.hpp"
#include "engine/tokenizer.hpp"
#include "evaluate/needle_text.hpp"
#include "evaluate/policies.hpp"
#include "evaluate/progress.hpp"

namespace kvmeld::llama {

namespace {

/// One line of the table: a policy, its budget, in which mode; none: the full cache.
struct contender {
  std::string name;
  std::optional<compression> by;
  index_t slots = 0;

  const char* mode_name() const {
    return !by ? "–" : by->how.how == mode::repack ? "repack" : "own";
  }
};

std::vector<contender> contenders_of(const evaluate::options& o, const std::vector<mode>& modes) {
  std::vector<contender> contenders = {{"full_cache", {}, o.prompt}};
  for (const auto& b : o.budgets) {
    for (const auto& p : o.policies) {
      expect_plain("--policies", p.name);
      const index_t slots = b.slots(o.prompt);
      for (const bool equal : {false, true}) {
        budget limit = budget_of(p.policy, slots, equal);
        limit.slack = kvmeld::declared(p.policy).supports_decode() ? o.room : 0;
        for (const mode how : modes) {
          if (!equal || budget_of(p.policy, slots, false).is_shared) {
            contenders.push_back(
                {equal ? p.name + "+equal" : p.name,
                 compression{p.policy, {.how = how, .limits = {limit}, .capacity = o.prompt + 64}},
                 slots});
          }
        }
      }
    }
  }
  return contenders;
}

/// Of a folder, or of a GGUF file by libllama.
engine::tokenizer tokenizer_of(const std::filesystem::path& model, index_t vocab) {
  if (std::filesystem::is_directory(model)) {
    return engine::tokenizer::load(model, vocab);
  }
  auto codec = engine::gguf::vocabulary_of(model);
  return engine::tokenizer(codec ? std::move(codec) : engine::byte_codec());
}

/// Does the model write the value, and no digit more, behind a body and the question?
bool answers(session& s, const engine::tokenizer& tokens, std::span<const int> body,
             const evaluate::needle_text& n) {
  std::span<const float> logits;
  s.clear();
  s.read(body, false, [](auto, auto) {});
  for (const int token : n.question) {
    logits = s.next(token);
  }
  evaluate::writer answer(tokens, std::span(&n.value, 1));
  while (const auto token = answer.next(row_of(logits))) {
    logits = s.next(*token);
  }
  return answer.written().value == 0;
}

}  // namespace

std::vector<mode> parse_modes(const std::string& list) {
  std::vector<mode> modes;
  for (const std::string& m : evaluate::detail::split(list)) {
    evaluate::detail::require(m == "repack" || m == "own",
                              "MODES: expected repack, own or repack,own, got '" + m + "'");
    modes.push_back(m == "own" ? mode::own_attention : mode::repack);
  }
  evaluate::detail::require(!modes.empty(), "MODES: expected repack, own or repack,own");
  return modes;
}

void run_tables(const evaluate::options& o, const std::string& gguf, const std::vector<mode>& modes,
                std::ostream& out, std::ostream& said) {
  const auto contenders = contenders_of(o, modes);
  const auto model = load_model(gguf);
  const auto tokens =
      tokenizer_of(o.model, llama_vocab_n_tokens(llama_model_get_vocab(model.get())));
  const index_t recent = std::max(1, llama_model_n_swa(model.get()));
  const auto text = tokens.encode(engine::read_file(o.text));
  const index_t parts = 64;  // tokens of a stream at once
  const auto streams = static_cast<std::size_t>(o.prompts);
  const auto length = static_cast<std::size_t>(o.prompt);
  evaluate::detail::require(
      text.size() >= length,
      fmt::format("--text: expected at least {} tokens, got {}", length, text.size()));
  const std::size_t apart = (text.size() - length) / std::max<std::size_t>(streams, 1);

  std::vector<evaluate::needle_text> needles, early;
  for (index_t i = 0; i < o.cases; ++i) {
    needles.push_back(evaluate::draw_needle(o, tokens, text, i, i % evaluate::depth_bins));
    auto one = o;
    one.needles = 1;
    early.push_back(evaluate::draw_needle(one, tokens, text, i, 0));
  }
  std::vector<std::vector<float>> whole;  // [streams · tokens] the full cache's logits
  evaluate::progress bar(said, false);
  bar.expect(static_cast<double>(contenders.size()));
  out << "| policy | mode | slots | needle, % | decoded needle, % | stream nll | KL to the full "
         "cache | cells |\n|---|---|---|---|---|---|---|---|\n";
  for (const contender& c : contenders) {
    bar.stage(c.name, 1);
    const bool full = !c.by;
    const index_t most = o.prompt + 64;
    index_t found = 0, found_early = 0;
    {
      // A prompt is one micro-batch, so that it is compressed as a whole.
      session s(model.get(), parameters_of(most, o.prompt, GGML_TYPE_F16, 1), c.by);
      for (const auto& n : needles) {
        // The question stands behind the fact, over the end of the body.
        const auto body = std::span(n.body).first(n.body.size() - n.question.size());
        found += answers(s, tokens, body, n) ? 1 : 0;
      }
    }
    // Where heads share a budget, the longest may hold all of a text.
    const bool ragged = full || c.by->how.limits.front().is_shared;
    session s(model.get(),
              parameters_of(ragged ? most : std::max(c.slots + o.room + 1, recent) + parts, parts,
                            GGML_TYPE_F16, 1),
              c.by);
    for (const auto& n : o.tasks.stream ? early : decltype(early)()) {
      found_early += answers(s, tokens, n.body, n) ? 1 : 0;
    }
    double nats = 0, divergence = 0;
    std::size_t counted = 0, row = 0;
    for (std::size_t i = 0; i < (o.tasks.stream ? streams : 0); ++i) {
      s.clear();
      std::vector<int> part(text.begin() + static_cast<std::ptrdiff_t>(i * apart),
                            text.begin() + static_cast<std::ptrdiff_t>(i * apart + length));
      part.front() = tokens.begin().value_or(part.front());
      for (std::size_t at = 0; at < length; at += static_cast<std::size_t>(parts)) {
        s.read(std::span(part).subspan(
                   at, std::min<std::size_t>(static_cast<std::size_t>(parts), length - at)),
               true, [&](std::size_t j, std::span<const float> logits) {
                 if (at + j < length / 4 || at + j + 1 >= length) {
                   return;
                 }
                 ++counted;
                 nats += surprise(logits, part[at + j + 1]);
                 if (full) {
                   whole.emplace_back(logits.begin(), logits.end());
                 } else {
                   divergence += evaluate::kl_divergence(row_of(whole[row++]), row_of(logits));
                 }
               });
      }
    }
    const double n = static_cast<double>(std::max<std::size_t>(counted, 1));
    out << fmt::format("| {} | {} | {} | {:.0f} | ", c.name, c.mode_name(), c.slots,
                       100.0 * found / o.cases)
        << (o.tasks.stream ? fmt::format("{:.0f} | {:.3f} | {:.4f} | {} |\n",
                                         100.0 * found_early / o.cases, nats / n, divergence / n,
                                         s.report().value_or(report{.cells = o.prompt}).cells)
                           : "– | – | – | – |\n")
        << std::flush;
  }
}

}  // namespace kvmeld::llama
