/// Task `chain`: transitions that are to be read off the whole prompt, and counted.
#pragma once

#include <memory>
#include <vector>

#include "evaluate/chain_text.hpp"
#include "evaluate/nll.hpp"
#include "evaluate/replay.hpp"
#include "evaluate/task.hpp"

namespace evaluate {

/// Nats a token above the best predictor, which sees the entire chain.
inline std::vector<score> chain(const engine::decoder& model, const chain_text& text,
                                std::span<const named_policy> policies,
                                std::span<const contender> contenders, index_t capacity) {
  const engine::record r = engine::prefill(model, text.body);
  const auto length = static_cast<index_t>(text.body.size());
  const auto body = std::make_shared<prompt_body>(model.shape(), r, length, capacity);
  const prompt read =
      measure(model.shape(), r, policies, body, replay_for(policies, model, r, text.body));
  std::vector<score> scores;
  for (const contender& c : contenders) {
    scores.push_back({predict(c, model, read, text.next, {}).nll - text.best});
  }
  return scores;
}

}  // namespace evaluate
