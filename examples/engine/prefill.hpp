/// A whole prompt through exact attention, with every layer's queries, keys and values on record.
#pragma once

#include <algorithm>  // std::min
#include <cstddef>
#include <span>
#include <vector>

#include "engine/causal.hpp"
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
inline record prefill(const decoder& model, std::span<const int> tokens,
                      logits_of kept = logits_of::last, index_t chunk = 256) {
  expects(!tokens.empty(), "prefill: at least one token expected, none came");
  expects(chunk > 0, "prefill: a positive chunk expected, ", chunk, " came");
  const config& c = model.shape();
  const auto count = static_cast<Eigen::Index>(tokens.size());
  record r;
  r.layers.resize(static_cast<std::size_t>(c.layers));
  for (auto& layer : r.layers) {
    layer.q.resize(count, Eigen::Index{c.heads} * c.dim);
    layer.k.resize(count, Eigen::Index{c.kv_heads} * c.dim);
    layer.v.resize(count, Eigen::Index{c.kv_heads} * c.dim);
  }
  if (kept == logits_of::all) {
    r.logits.resize(count, c.vocab);
  }
  decoder::scratch scratch;
  row_major_matrix logits;
  for (Eigen::Index begin = 0; begin < count; begin += chunk) {
    const Eigen::Index rows = std::min<Eigen::Index>(chunk, count - begin), end = begin + rows;
    const auto first = static_cast<index_t>(begin);
    const auto attend = [&](index_t layer, const auto& q, const auto& k, const auto& v, auto& out) {
      auto& l = r.layers[static_cast<std::size_t>(layer)];
      l.q.middleRows(begin, rows) = q;
      l.k.middleRows(begin, rows) = k;
      l.v.middleRows(begin, rows) = v;
      causal_attention(q, l.k.topRows(end), l.v.topRows(end), c.heads, c.kv_heads, c.dim, first,
                       out);
    };
    const auto part =
        tokens.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(rows));
    model.forward(scratch, part, first, attend, logits, kept == logits_of::last);
    if (kept == logits_of::all) {
      r.logits.middleRows(begin, rows) = logits;
    }
  }
  if (kept == logits_of::last) {
    r.logits = logits;
  }
  return r;
}

}  // namespace engine
