// SPDX-License-Identifier: MIT
/// Exact causal attention over everything so far: what a policy's attention is measured against.
#pragma once

#include "engine/matrix.hpp"

namespace engine {

/// Queries `q [tokens, heads * dim]` at positions `first` and on, over the keys and values
/// `k, v [first + tokens, kv_heads * dim]` of positions 0 and on. Fills `out [tokens, heads *
/// dim]`. Needs memory for `64 * (first + tokens)` floats.
void causal_attention(const matrix_view& q, const matrix_view& k, const matrix_view& v,
                      index_t heads, index_t kv_heads, index_t dim, index_t first,
                      row_major_matrix& out);
row_major_matrix causal_attention(const matrix_view& q, const matrix_view& k, const matrix_view& v,
                                  index_t heads, index_t kv_heads, index_t dim, index_t first);

}  // namespace engine
