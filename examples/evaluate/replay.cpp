#include "evaluate/replay.hpp"

#include <algorithm>  // std::min, std::ranges::any_of

namespace evaluate {

namespace {

/// Positions that a part of the second reading takes; every part begins right behind the prompt, so
/// that no more of the model's context is needed.
constexpr index_t replay_chunk = 256;

bool wants_replay(std::span<const named_policy> policies) {
  return std::ranges::any_of(
      policies, [](const named_policy& p) { return p.queries == query_source::replay; });
}

}  // namespace

replayed_prompt replay(const engine::decoder& model, const engine::record& r,
                       std::span<const int> tokens) {
  replayed_prompt again;
  const auto count = static_cast<index_t>(tokens.size());
  for (const auto& layer : r.layers) {
    again.queries.emplace_back(count, layer.q.cols());
  }
  for (index_t begin = 0; begin < count; begin += replay_chunk) {
    const index_t rows = std::min(replay_chunk, count - begin);
    engine::record behind = r;
    extend(model, behind,
           tokens.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(rows)));
    for (std::size_t l = 0; l < r.layers.size(); ++l) {
      again.queries[l].middleRows(begin, rows) = behind.layers[l].q.bottomRows(rows);
    }
    for (index_t i = 0; i < rows; ++i) {
      again.positions.push_back(count + i);
    }
  }
  return again;
}

replayed_prompt replay_for(std::span<const named_policy> policies, const engine::decoder& model,
                           const engine::record& r, std::span<const int> tokens) {
  return wants_replay(policies) ? replay(model, r, tokens) : replayed_prompt{};
}

}  // namespace evaluate
