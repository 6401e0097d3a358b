// SPDX-License-Identifier: MIT
/// Task `copy`: a passage of the prompt comes once more behind it, to be copied from there.
#pragma once

#include <algorithm>  // std::min

#include "evaluate/behind.hpp"

namespace evaluate {

/// Tokens of the passage, of a prompt of twice as many at least.
inline constexpr index_t copied_tokens = 128;

/// Nats a token of the passage from the middle of `text`, the second time.
inline std::vector<score> copy(const engine::decoder& model, std::span<const int> text,
                               std::span<const named_policy> policies,
                               std::span<const contender> contenders, index_t capacity) {
  const std::size_t length = text.size();
  const std::size_t count = std::min<std::size_t>(copied_tokens, length / 2);
  return nats_behind(model, text, text.subspan((length - count) / 2, count), policies, contenders,
                     capacity);
}

}  // namespace evaluate
