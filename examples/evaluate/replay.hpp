// SPDX-License-Identifier: MIT
/// Replay: a second prefill, in which the prompt follows itself.
#pragma once

#include <span>

#include "engine/tokenizer.hpp"
#include "evaluate/prompt.hpp"

namespace evaluate {

/// KVzip's words; `turn`: what the model's chat template has around them, or nothing.
replay_words replay_words_of(const engine::tokenizer& tokens, const engine::chat_turn& turn);

/// Tokens of the prompt that are read again at a time, as in KVzip's code; and for reference
/// queries, so that they stay near what is to come and within the model's context.
inline constexpr index_t repeated_chunk = 2048, behind_chunk = 256;

/// Reads `tokens`, of which `r` is the record, once more, `chunk` at a time: every part begins
/// right behind the prompt, with `words` if there are any.
replayed_prompt replay(const engine::decoder& model, const engine::record& r,
                       std::span<const int> tokens, const replay_words& words, index_t chunk);

/// The second readings that some of the policies measure on.
second_readings replay_for(std::span<const named_policy> policies, const engine::decoder& model,
                           const engine::record& r, std::span<const int> tokens);

}  // namespace evaluate
