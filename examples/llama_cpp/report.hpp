// SPDX-License-Identifier: MIT
/// What the adapter says of the text behind it.
#pragma once

#include "llama_cpp/layers.hpp"

namespace kvmeld::llama {

/// What is held, what is reserved for it, and what the whole cache would be.
struct report {
  std::int64_t tokens = 0;
  index_t cells = 0;      ///< of the engine that are in use
  index_t slots = 0;      ///< of the longest head
  std::size_t bytes = 0;  ///< keys, values, log-mass, positions and the policy's state in use
  /// Room for the same, used or not, and the engine's cells, which are there in either mode (known
  /// from the first graph on).
  std::size_t reserved_bytes = 0;
  std::size_t full_bytes = 0;  ///< keys and values of all tokens
  times spent = {};
};

/// Fills in what follows from `tokens` and `cells`.
template <policy P>
void count(layers<P>& all, const layers_setup& setup, report& r) {
  const std::size_t row = 2 * row_bytes(setup.storage, setup.shape.dim),
                    record = sizeof(float) + sizeof(index_t);
  for (index_t l = 0; l < all.count(); ++l) {
    if (const auto& engine = all[l].engine; engine.keys != nullptr && engine.values != nullptr) {
      r.reserved_bytes += ggml_nbytes(engine.keys) + ggml_nbytes(engine.values);
    }
    for (index_t h = 0; h < setup.shape.heads; ++h) {
      auto& [records, state, limit, cells, own] = all[l].at(h);
      const index_t n = *records.of(0).length;
      r.slots = std::max(r.slots, n);
      const auto slots = static_cast<std::size_t>(n),
                 room = static_cast<std::size_t>(records.capacity()),
                 columns = static_cast<std::size_t>(state.columns());
      // Repack cannot give back a cell that another head holds.
      const auto rows = static_cast<std::size_t>(setup.how == mode::repack ? r.cells : n);
      r.bytes += rows * row + slots * record + state.bytes();
      r.reserved_bytes +=
          own.size() + room * record + state.bytes() + (room - slots) * columns * sizeof(float);
      r.full_bytes += static_cast<std::size_t>(r.tokens) * row;
    }
  }
  r.spent = all.spent();
}

}  // namespace kvmeld::llama
