// SPDX-License-Identifier: MIT
/// Making the material: all that the full model has to do.
#pragma once

#include <algorithm>  // std::max
#include <span>
#include <vector>

#include "evaluate/dataset.hpp"
#include "evaluate/replay.hpp"
#include "evaluate/speed.hpp"
#include "evaluate/weights.hpp"

namespace evaluate {

/// Drawn before anything is run: they may not fit.
inline std::vector<needle_text> draw_needles(const options& o, const engine::tokenizer& tokens,
                                             std::span<const int> text) {
  std::vector<needle_text> needles;
  for (index_t i = 0; o.tasks.needle && i < o.cases; ++i) {
    // All depths count alike.
    needles.push_back(draw_needle(o, tokens, text, i, i % depth_bins));
  }
  return needles;
}

/// Reads prompts and streams, as far as the tasks need them.
inline void prepare(dataset& m, const options& o, const plan& todo, const engine::decoder& model,
                    std::span<const int> text, const workers& on, progress& bar) {
  const index_t slots = std::max(o.prompt, todo.most_slots);
  bar.stage("reading prompts", weight::prompt * todo.prompts);
  m.prompts = on.map(todo.prompts, [&](index_t i) {
    const auto drawn = draw_text(text, o.seed, 1, i, o.prompt + todo.behind);
    return read_prompt(model, todo.policies, drawn, o.prompt, o.future_tokens(),
                       slots + todo.behind + 1, o.tasks.nll, i == 0 ? &m.timed : nullptr);
  });
  bar.stage("reading streams", weight::stream_token * todo.streams * todo.longest_stream);
  m.streams = on.map(todo.streams, [&](index_t i) {
    return read_stream(model, draw_text(text, o.seed, 3, i, todo.longest_stream));
  });
  if (o.tasks.speed) {
    bar.stage("reading a prompt alone", weight::prompt * o.threads);
    const auto first = draw_text(text, o.seed, 1, 0, o.prompt + todo.behind)
                           .first(static_cast<std::size_t>(o.prompt));
    m.prefill_seconds = prefill_seconds(model, first);
    m.again = replay_for(todo.policies, model, m.timed, first);
  }
}

}  // namespace evaluate
