// SPDX-License-Identifier: MIT
/// A whole prompt through exact attention, with every layer's queries, keys and values on record.
#pragma once

#include <span>
#include <vector>

#include "engine/decoder.hpp"
#include "engine/matrix.hpp"

namespace engine {

/// What one layer's attention saw: rotated `q [tokens, heads * dim]` and `k [tokens, kv_heads *
/// dim]`, `v` likewise.
struct layer_record {
  row_major_matrix q, k, v;
};

struct record {
  std::vector<layer_record> layers;
  row_major_matrix logits;  ///< [tokens, vocab], or [1, vocab] of the last token
};

enum class logits_of { last, all };

/// Runs `tokens` at positions 0 and on, `chunk` at a time: activations take memory for one chunk.
record prefill(const decoder& model, std::span<const int> tokens, logits_of kept = logits_of::last,
               index_t chunk = 256);

}  // namespace engine
