/// Replay: the prompt's queries when the model reads it once more behind itself (as KVzip does).
#pragma once

#include <span>

#include "evaluate/prompt.hpp"

namespace evaluate {

/// Reads `tokens`, of which `r` is the record, once more.
replayed_prompt replay(const engine::decoder& model, const engine::record& r,
                       std::span<const int> tokens);

/// The second reading if one of the policies measures on it; else nothing.
replayed_prompt replay_for(std::span<const named_policy> policies, const engine::decoder& model,
                           const engine::record& r, std::span<const int> tokens);

}  // namespace evaluate
