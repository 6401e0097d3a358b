// SPDX-License-Identifier: MIT
/// Nats of what follows a prompt, for the tasks that count them.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "evaluate/nll.hpp"
#include "evaluate/replay.hpp"
#include "evaluate/task.hpp"

namespace evaluate {

/// For each contender, mean nats a token of `next` behind the prompt `text`.
inline std::vector<score> nats_behind(const engine::decoder& model, std::span<const int> text,
                                      std::span<const int> next,
                                      std::span<const named_policy> policies,
                                      std::span<const contender> contenders, index_t capacity) {
  const engine::record r = engine::prefill(model, text);
  const auto body =
      std::make_shared<prompt_body>(model.shape(), r, static_cast<index_t>(text.size()), capacity);
  const prompt read =
      measure(model.shape(), r, policies, body, replay_for(policies, model, r, text));
  std::vector<score> scores;
  for (const contender& c : contenders) {
    scores.push_back({predict(c, model, read, next, {}).nll});
  }
  return scores;
}

}  // namespace evaluate
