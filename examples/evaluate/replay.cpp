// SPDX-License-Identifier: MIT
#include "evaluate/replay.hpp"

#include <algorithm>  // std::min, std::ranges::mismatch
#include <chrono>

namespace evaluate {

namespace {

/// Of the part before, so many tokens follow the words, for a part to begin behind them.
constexpr index_t replay_overlap = 8;

/// The words before the part of `tokens` that begins at `begin`, and that part.
std::vector<int> part_of(std::span<const int> tokens, index_t begin, index_t count,
                         const replay_words& words) {
  std::vector<int> part = begin == 0 ? words.whole : words.part;
  const auto add = [&](std::span<const int> more) {
    part.insert(part.end(), more.begin(), more.end());
  };
  const index_t overlap = words.part.empty() ? 0 : std::min(begin, replay_overlap);
  add(tokens.subspan(static_cast<std::size_t>(begin - overlap), static_cast<std::size_t>(overlap)));
  add(words.end);
  add(tokens.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count)));
  return part;
}

}  // namespace

replay_words replay_words_of(const engine::tokenizer& tokens, const engine::chat_turn& turn) {
  return {.whole = tokens.encode_fragment("\n\nRepeat the previous context exactly."),
          .part = tokens.encode_fragment(
              "\n\nRepeat the part of the previous context exactly, starting with"),
          .end = turn.after.empty() ? tokens.encode_fragment("\n") : turn.after,
          .skipped = turn.before};
}

replayed_prompt replay(const engine::decoder& model, const engine::record& r,
                       std::span<const int> tokens, const replay_words& words, index_t chunk) {
  const auto started = std::chrono::steady_clock::now();
  replayed_prompt again;
  const auto count = static_cast<index_t>(tokens.size());
  again.layers.resize(r.layers.size());
  const bool skips = std::ranges::mismatch(words.skipped, tokens).in1 == words.skipped.end();
  const auto first = skips ? static_cast<index_t>(words.skipped.size()) : 0;
  const auto read = tokens.subspan(static_cast<std::size_t>(first));
  for (index_t begin = 0; begin < count - first; begin += chunk) {
    const auto part = part_of(read, begin, std::min(chunk, count - first - begin), words);
    const auto rows = static_cast<index_t>(part.size());
    engine::record behind = r;
    extend(model, behind, part);
    const auto before = static_cast<Eigen::Index>(again.positions.size());
    for (std::size_t l = 0; l < r.layers.size(); ++l) {
      auto& all = again.layers[l];
      const auto& layer = behind.layers[l];
      for (const auto& [to, from] :
           {std::pair{&all.q, &layer.q}, {&all.k, &layer.k}, {&all.v, &layer.v}}) {
        to->conservativeResize(before + rows, from->cols());
        to->bottomRows(rows) = from->bottomRows(rows);
      }
    }
    for (index_t i = 0; i < rows; ++i) {
      again.positions.push_back(count + i);
    }
    again.parts.push_back(rows);
  }
  again.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  return again;
}

second_readings replay_for(std::span<const named_policy> policies, const engine::decoder& model,
                           const engine::record& r, std::span<const int> tokens) {
  second_readings both;
  for (const named_policy& p : policies) {
    if (p.observes_replay() && both.repeated.parts.empty()) {
      both.repeated = replay(model, r, tokens, p.words, repeated_chunk);
    } else if (p.queries == query_source::replay && !p.observes_replay() &&
               both.behind.parts.empty()) {
      both.behind = replay(model, r, tokens, {}, behind_chunk);
    }
  }
  return both;
}

}  // namespace evaluate
