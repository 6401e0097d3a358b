// SPDX-License-Identifier: MIT
/// Exact causal attention, and a whole prompt through it: every layer's queries, keys and values on
/// record.
#pragma once

#include <limits>  // std::numeric_limits
#include <span>
#include <vector>

#include "engine/decoder.hpp"
#include "engine/matrix.hpp"

namespace engine {

/// Queries `q [tokens, heads * dim]` at positions `first` and on, over the keys and values
/// `k, v [first + tokens, kv_heads * dim]` of positions 0 and on, to `[tokens, heads * dim]`, as
/// `spec` says, but for sinks, slopes and values of another dim, which are refused: what a policy's
/// attention is measured against. Needs memory for `64 * (first + tokens)` floats.
row_major_matrix causal_attention(const matrix_view& q, const matrix_view& k, const matrix_view& v,
                                  const kvmeld::attention_spec& spec, index_t first);

/// What one layer's attention saw: rotated `q [tokens, heads * dim]` and `k [tokens, kv_heads *
/// dim]`, `v` likewise, and of what these were made of: the norms `[tokens, 1]` and, where a record
/// keeps it, all of `hidden [tokens, hidden]`.
struct layer_record {
  row_major_matrix q, k, v, hidden_norm = {}, hidden = {};
};

struct record {
  std::vector<layer_record> layers;
  row_major_matrix logits;  ///< [tokens, vocab], or [1, vocab] of the last token
  bool keeps_hidden = false;
};

enum class logits_of { last, all };

/// Goes on where `r` ends, `chunk` tokens at a time: activations take memory for one chunk.
/// `r.logits` are the last token's, or those of all `tokens`. `streams`: takes what each layer's
/// attention is added to, `[chunk, hidden]`.
void extend(const decoder& model, record& r, std::span<const int> tokens,
            logits_of kept = logits_of::last, index_t chunk = std::numeric_limits<index_t>::max(),
            std::vector<row_major_matrix>* streams = nullptr);

/// Runs `tokens` at positions 0 and on.
record prefill(const decoder& model, std::span<const int> tokens, logits_of kept = logits_of::last,
               index_t chunk = 256, bool keeps_hidden = false);

}  // namespace engine
