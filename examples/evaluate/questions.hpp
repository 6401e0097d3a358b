// SPDX-License-Identifier: MIT
/// Tasks `ruler` and `stream_needle`: questions about what is planted in a prompt, after
/// compression and before it, or was decoded long ago.
#pragma once

#include <string>
#include <vector>

#include "evaluate/needle.hpp"
#include "evaluate/nll.hpp"
#include "evaluate/ruler_text.hpp"
#include "evaluate/task.hpp"

namespace evaluate {

/// What ends an answer before the next question.
inline constexpr const char* answer_end = ".\n";

namespace detail {

/// One value or two. Greedy decoding gives one; of two, the other is asked for from the same place,
/// where the answer may not begin as the first one did.
inline bool gives_all(compressed_decoder& decoder, const row_major_matrix* logits,
                      const engine::tokenizer& tokens, const std::vector<std::string>& values) {
  if (values.size() == 1) {
    return write(decoder, logits, tokens, values).value == 0;
  }
  compressed_decoder again = decoder;
  const row_major_matrix same = *logits;
  const reply first = write(decoder, logits, tokens, values);
  return first.value < values.size() &&
         write(again, &same, tokens, values, first.begins).value == 1 - first.value;
}

}  // namespace detail

/// Are all questions answered, one after another? `inside`: the first one ends the prompt `p`.
inline bool answers_all(const contender& c, const engine::decoder& model,
                        const engine::tokenizer& tokens, const prompt& p,
                        const std::vector<ruler_ask>& asks, bool inside) {
  compressed_decoder decoder(model, c, p);
  const row_major_matrix* logits = &p.logits;
  const auto feed = [&](std::span<const int> words) {
    for (const int token : words) {
      logits = &decoder.next(token);
    }
  };
  for (std::size_t i = 0; i < asks.size(); ++i) {
    if (i > 0) {
      feed(tokens.encode_fragment(answer_end));
    }
    if (i > 0 || !inside) {
      feed(asks[i].question);
    }
    if (!detail::gives_all(decoder, logits, tokens, asks[i].values)) {
      return false;
    }
  }
  return true;
}

/// Most tokens after the prompt.
inline index_t tokens_to_come(const ruler_text& text) {
  std::size_t count = 0;
  for (const ruler_ask& ask : text.asks) {
    count += ask.question.size() + std::max(ask.values.front().size(), ask.values.back().size()) +
             std::string_view(answer_end).size() + 3;
  }
  return static_cast<index_t>(count);
}

/// 1 or 0 for each contender; `slots` is the most that a prompt or a budget takes.
inline std::vector<score> ruler(const engine::decoder& model, const engine::tokenizer& tokens,
                                const ruler_text& text, std::span<const named_policy> policies,
                                std::span<const contender> contenders, index_t slots) {
  const needle_case read =
      read_needle(model, policies, tokens,
                  {.body = text.body, .question = text.asks.front().question, .value = {}},
                  slots + tokens_to_come(text));
  std::vector<score> scores;
  for (const contender& c : contenders) {
    const auto share = [&](const prompt& p, bool inside) {
      return !interrupted && answers_all(c, model, tokens, p, text.asks, inside) ? 1.0 : 0.0;
    };
    scores.push_back({share(read.without, false), share(read.with, true)});
  }
  return scores;
}

/// Text and question are decoded token by token from an empty cache: 1 or 0 for each contender, the
/// true answer's nats, and KL from the first one's, the full cache, over the text after its first
/// quarter. All of them side by side: the weights, most of what a token reads, are read once.
inline std::vector<score> stream_needle(const engine::decoder& model,
                                        const engine::tokenizer& tokens, const needle_text& text,
                                        std::span<const contender> contenders) {
  const auto most =
      static_cast<index_t>(text.body.size() + text.question.size() + text.value.size() + 3);
  std::vector<compressed_decoder> decoders;
  std::vector<compressed_decoder*> all;
  decoders.reserve(contenders.size());  // they stay where they are
  for (const contender& c : contenders) {
    all.push_back(&decoders.emplace_back(model, c, most));
  }
  const auto row = [](const row_major_matrix& all_rows, std::size_t i) {
    return all_rows.row(static_cast<Eigen::Index>(i));
  };
  std::vector<double> kl(contenders.size(), 0);
  engine::decoder::scratch work;
  row_major_matrix logits;
  const std::size_t first = text.body.size() / 4;
  for (std::size_t t = 0; t < text.body.size() && !interrupted; ++t) {
    compressed_decoder::next(all, std::vector<int>(all.size(), text.body[t]), work, logits);
    for (std::size_t i = 0; i < kl.size() && t >= first; ++i) {
      kl[i] += kl_divergence(row(logits, 0), row(logits, i)) /
               static_cast<double>(text.body.size() - first);
    }
  }
  for (std::size_t t = 0; t < text.question.size() && !interrupted; ++t) {
    compressed_decoder::next(all, std::vector<int>(all.size(), text.question[t]), work, logits);
  }
  const std::vector<int> answer = tokens.encode_fragment(' ' + text.value);
  std::vector<score> scores;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (interrupted) {
      scores.push_back({0, {}, 0, 0});
      continue;
    }
    const row_major_matrix own = row(logits, i);
    double nats = surprise(own, answer.front());
    compressed_decoder again = *all[i];
    for (std::size_t t = 1; t < answer.size(); ++t) {
      nats += surprise(again.next(answer[t - 1]), answer[t]);
    }
    const bool right = write(*all[i], &own, tokens, std::span(&text.value, 1)).value == 0;
    scores.push_back({right ? 1.0 : 0.0, {}, nats / static_cast<double>(answer.size()), kl[i]});
  }
  return scores;
}

}  // namespace evaluate
