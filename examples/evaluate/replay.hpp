/// Replay: the model reads the prompt once more behind itself, as KVzip has it repeat the context.
#pragma once

#include <span>

#include "engine/tokenizer.hpp"
#include "evaluate/prompt.hpp"

namespace evaluate {

/// KVzip's words, of a model without a chat template.
replay_words replay_words_of(const engine::tokenizer& tokens);

/// Tokens of the prompt that are read again at a time, as in KVzip's code. Every part begins right
/// behind the prompt.
inline constexpr index_t replay_chunk = 2048;

/// Reads `tokens`, of which `r` is the record, once more, `chunk` at a time.
replayed_prompt replay(const engine::decoder& model, const engine::record& r,
                       std::span<const int> tokens, const replay_words& words,
                       index_t chunk = replay_chunk);

/// The second reading if one of the policies measures on it; else nothing.
replayed_prompt replay_for(std::span<const named_policy> policies, const engine::decoder& model,
                           const engine::record& r, std::span<const int> tokens);

}  // namespace evaluate
