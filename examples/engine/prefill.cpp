// SPDX-License-Identifier: MIT
#include "engine/prefill.hpp"

#include <algorithm>  // std::min
#include <cstddef>

#include "engine/causal.hpp"

namespace engine {

record prefill(const decoder& model, std::span<const int> tokens, logits_of kept, index_t chunk) {
  expects(!tokens.empty(), "prefill: expected at least 1 token, got 0");
  expects(chunk > 0, "prefill: expected a chunk of at least 1 token, got ", chunk);
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
