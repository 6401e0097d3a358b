// SPDX-License-Identifier: MIT
// Guesses of the tokens that come next, for a draft.
#pragma once

#include <algorithm>  // std::equal
#include <span>
#include <vector>

#include "kvmeld/config.hpp"

namespace test {

using kvmeld::index_t;

/// Prompt look-up: what came after the latest earlier place of the text's last three tokens, or
/// two, or one; at most `most` tokens, none where there is no such place.
inline std::vector<int> look_up(std::span<const int> text, index_t most) {
  const auto size = static_cast<index_t>(text.size());
  for (index_t n = std::min(size - 1, 3); n > 0; --n) {
    const auto last = text.last(static_cast<std::size_t>(n));
    for (index_t at = size - n - 1; at >= 0; --at) {
      if (std::equal(last.begin(), last.end(), text.begin() + at)) {
        const auto next = text.subspan(static_cast<std::size_t>(at + n));
        return {next.begin(), next.begin() + std::min(most, size - at - n)};
      }
    }
  }
  return {};
}

}  // namespace test
