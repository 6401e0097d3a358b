/// What the adapter says of the text behind it.
#pragma once

#include "llama_cpp/layers.hpp"

namespace kvfold::llama {

/// What is held, and what the whole cache would be.
struct report {
  std::int64_t tokens = 0;
  index_t cells = 0;           ///< of the engine that are in use
  index_t slots = 0;           ///< of the longest head
  std::size_t bytes = 0;       ///< keys, values, log-mass, positions and the policy's state in use
  std::size_t full_bytes = 0;  ///< keys and values of all tokens
  times spent = {};
};

/// Fills in what follows from `tokens` and `cells`.
template <storage_scalar Scalar, policy P>
void count(layers<Scalar, P>& all, const layers_setup& setup, report& r) {
  const std::size_t row = 2 * static_cast<std::size_t>(setup.shape.dim) * sizeof(Scalar);
  for (index_t l = 0; l < all.count(); ++l) {
    for (index_t h = 0; h < setup.shape.heads; ++h) {
      auto& [records, state, limit, cells, own] = all[l].at(h);
      const index_t n = *records.of(0).length;
      r.slots = std::max(r.slots, n);
      // Repack cannot give back a cell that another head holds.
      const auto rows = static_cast<std::size_t>(setup.how == mode::repack ? r.cells : n);
      r.bytes += rows * row + static_cast<std::size_t>(n) * (sizeof(float) + sizeof(index_t)) +
                 state.bytes();
      r.full_bytes += static_cast<std::size_t>(r.tokens) * row;
    }
  }
  r.spent = all.spent();
}

}  // namespace kvfold::llama
