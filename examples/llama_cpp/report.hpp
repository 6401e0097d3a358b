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
  const std::size_t row = 2 * row_bytes(setup.storage, setup.spec.key_dim),
                    record = sizeof(float) + sizeof(index_t),
                    room = static_cast<std::size_t>(setup.capacity);
  for (index_t l = 0; l < setup.layers; ++l) {
    if (const auto& engine = all[l].engine; engine.keys != nullptr && engine.values != nullptr) {
      r.reserved_bytes += ggml_nbytes(engine.keys) + ggml_nbytes(engine.values);
    }
    for (index_t h = 0; h < setup.spec.kv_heads; ++h) {
      const index_t n = all.head(l, h).length();
      const auto slots = static_cast<std::size_t>(n);
      r.slots = std::max(r.slots, n);
      // Repack cannot give back a cell that another head holds.
      r.bytes += (setup.how == mode::repack ? static_cast<std::size_t>(r.cells) : slots) * row +
                 slots * record;
      r.reserved_bytes += all.cache().own_bytes(l, h) + room * record;
      if (const head_state* const state = all.state(l, h)) {
        r.bytes += state->bytes();
        r.reserved_bytes += state->bytes() + (room - slots) * sizeof(float) *
                                                 static_cast<std::size_t>(state->slot_stats());
      }
      r.full_bytes += static_cast<std::size_t>(r.tokens) * row;
    }
  }
  r.spent = all.spent();
}

}  // namespace kvmeld::llama
