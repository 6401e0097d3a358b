// SPDX-License-Identifier: MIT
/// Task `chain`: transitions that are to be read off the whole prompt, and counted.
#pragma once

#include <vector>

#include "evaluate/behind.hpp"
#include "evaluate/chain_text.hpp"

namespace evaluate {

/// Nats a token above the best predictor, which sees the entire chain.
inline std::vector<score> chain(const engine::decoder& model, const chain_text& text,
                                std::span<const named_policy> policies,
                                std::span<const contender> contenders, index_t capacity) {
  auto scores = nats_behind(model, text.body, text.next, policies, contenders, capacity);
  for (score& s : scores) {
    s.after -= text.best;
  }
  return scores;
}

}  // namespace evaluate
