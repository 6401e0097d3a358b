// SPDX-License-Identifier: MIT
/// Facts planted in a text, and a question about one of them.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "engine/tokenizer.hpp"
#include "evaluate/options.hpp"
#include "evaluate/random.hpp"

namespace evaluate {

inline constexpr index_t depth_bins = 10;

/// One needle case, as tokens.
struct needle_text {
  std::vector<int> body;  ///< text with needles, as long as the prompt; before it a turn's begin
  std::vector<int> question = {};  ///< fits behind the last needle, over the end of the body
  std::string value = {};          ///< the answer
  index_t bin = 0;                 ///< depth of the needle asked for, 0 .. depth_bins − 1
  index_t fact = 0;                ///< where that needle begins
  index_t fact_tokens = 0;
};

/// What stands around a needle case; nothing without `--chat`. Throws `usage_error`: no template.
engine::chat_turn chat_turn_of(const options& o, const engine::tokenizer& tokens);

std::string fill_in(std::string text, const std::string& key, const std::string& value);

/// A question that was filled in, with the end of `turn` where it has `{turn}`, or behind it.
std::vector<int> encode_question(const std::string& text, const engine::tokenizer& tokens,
                                 const engine::chat_turn& turn);

namespace detail {

/// `n` of them, all different.
std::vector<std::string> draw_names(random_source& random, index_t n);

}  // namespace detail

/// Case `i`, with the needle that is asked for in depth bin `bin`.
needle_text draw_needle(const options& o, const engine::tokenizer& tokens,
                        std::span<const int> text, index_t i, index_t bin);

}  // namespace evaluate
