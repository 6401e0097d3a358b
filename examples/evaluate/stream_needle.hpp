// SPDX-License-Identifier: MIT
/// Task `stream_needle`: a fact that was decoded long ago, while all that comes is decoded through
/// `step`.
#pragma once

#include <vector>

#include "evaluate/needle.hpp"
#include "evaluate/task.hpp"

namespace evaluate {

/// One fact, in the first tenth of a text as long as a prompt.
inline needle_text draw_stream_needle(options o, const engine::tokenizer& tokens,
                                      std::span<const int> text, index_t i) {
  o.needles = 1;
  return draw_needle(o, tokens, text, i, 0);
}

/// Text and question are decoded token by token from an empty cache: 1 or 0 for each contender.
inline std::vector<score> stream_needle(const engine::decoder& model,
                                        const engine::tokenizer& tokens, const needle_text& text,
                                        std::span<const contender> contenders) {
  const auto most =
      static_cast<index_t>(text.body.size() + text.question.size() + text.value.size() + 3);
  std::vector<score> scores;
  for (const contender& c : contenders) {
    compressed_decoder decoder(model, c, most);
    const row_major_matrix* logits = nullptr;
    for (const auto* const part : {&text.body, &text.question}) {
      for (std::size_t t = 0; t < part->size() && !interrupted; ++t) {
        logits = &decoder.next((*part)[t]);
      }
    }
    const bool right =
        !interrupted && write(decoder, logits, tokens, std::span(&text.value, 1)).value == 0;
    scores.push_back({right ? 1.0 : 0.0});
  }
  return scores;
}

}  // namespace evaluate
