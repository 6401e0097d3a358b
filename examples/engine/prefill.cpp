// SPDX-License-Identifier: MIT
#include "engine/prefill.hpp"

#include <algorithm>  // std::min
#include <cmath>      // std::sqrt

namespace engine {

row_major_matrix causal_attention(const matrix_view& q, const matrix_view& k, const matrix_view& v,
                                  const kvmeld::attention_spec& spec, index_t first) {
  const Eigen::Index tokens = q.rows(), seen = first + tokens;
  const index_t heads = spec.query_heads(), kv_heads = spec.kv_heads, dim = spec.key_dim;
  expects(spec.sink_logits.empty() && spec.alibi_slopes.empty() && spec.dim_of_values() == dim,
          "causal_attention: expected no sinks, no slopes and values of dim ", dim, ", got some");
  expects(q.cols() == Eigen::Index{heads} * dim, "causal_attention: expected q [", tokens, ", ",
          heads * dim, "], got [", q.rows(), ", ", q.cols(), "]");
  for (const auto* m : {&k, &v}) {
    expects(m->rows() == seen && m->cols() == Eigen::Index{kv_heads} * dim,
            "causal_attention: expected k and v [", seen, ", ", kv_heads * dim, "], got [",
            m->rows(), ", ", m->cols(), "]");
  }
  constexpr Eigen::Index block = 64;  // queries at a time: their scores stay in the cache
  const float scale = spec.scale > 0 ? spec.scale : 1 / std::sqrt(static_cast<float>(dim));
  const index_t group = spec.group;
  row_major_matrix scores(std::min(block, tokens), seen);
  Eigen::VectorXf sums(scores.rows());
  row_major_matrix out(tokens, q.cols());
  for (index_t head = 0; head < heads; ++head) {
    const auto keys = k.middleCols(Eigen::Index{head / group} * dim, dim);
    const auto values = v.middleCols(Eigen::Index{head / group} * dim, dim);
    const Eigen::Index column = Eigen::Index{head} * dim;
    for (Eigen::Index begin = 0; begin < tokens; begin += block) {
      // The slots that any of the rows sees.
      const Eigen::Index rows = std::min(block, tokens - begin), end = first + begin + rows;
      const auto oldest = [&](Eigen::Index position) {
        return spec.window > 0 ? std::max<Eigen::Index>(position + 1 - spec.window, 0) : 0;
      };
      const Eigen::Index from = oldest(first + begin), length = end - from;
      auto p = scores.topLeftCorner(rows, length);
      p.noalias() = q.block(begin, column, rows, dim) * keys.middleRows(from, length).transpose();
      for (Eigen::Index r = 0; r < rows; ++r) {
        const Eigen::Index position = first + begin + r, hidden = oldest(position) - from,
                           visible = position + 1 - from - hidden;
        auto row = p.row(r).segment(hidden, visible).array();
        if (spec.soft_cap > 0) {
          row = (row * (scale / spec.soft_cap)).tanh() * (spec.soft_cap / scale);
        }
        row = ((row - row.maxCoeff()) * scale).exp();
        sums(r) = row.sum();
        p.row(r).head(hidden).setZero();
        p.row(r).tail(length - hidden - visible).setZero();
      }
      auto result = out.block(begin, column, rows, dim);
      result.noalias() = p * values.middleRows(from, length);
      result.array().colwise() /= sums.head(rows).array();
    }
  }
  return out;
}

void extend(const decoder& model, record& r, std::span<const int> tokens, logits_of kept,
            index_t chunk, std::vector<row_major_matrix>* streams) {
  expects(!tokens.empty(), "extend: expected at least 1 token, got 0");
  expects(chunk > 0, "extend: expected a chunk of at least 1 token, got ", chunk);
  const config& c = model.shape();
  const auto count = static_cast<Eigen::Index>(tokens.size());
  r.layers.resize(as_size(c.layers));
  const Eigen::Index before = r.layers.front().q.rows();
  for (auto& layer : r.layers) {
    layer.q.conservativeResize(before + count, Eigen::Index{c.heads} * c.dim);
    layer.k.conservativeResize(before + count, Eigen::Index{c.kv_heads} * c.dim);
    layer.v.conservativeResize(before + count, Eigen::Index{c.kv_heads} * c.dim);
    layer.hidden_norm.conservativeResize(before + count, 1);
    layer.hidden.conservativeResize(before + count, r.keeps_hidden ? c.hidden : 0);
  }
  r.logits.resize(kept == logits_of::all ? count : 1, c.vocab);
  decoder::scratch scratch;
  row_major_matrix logits;
  for (Eigen::Index begin = 0; begin < count; begin += chunk) {
    const Eigen::Index rows = std::min<Eigen::Index>(chunk, count - begin), first = before + begin;
    const auto attend = [&](index_t layer, const auto& q, const auto& k, const auto& v, auto& out) {
      auto& l = r.layers[as_size(layer)];
      l.q.middleRows(first, rows) = q;
      l.k.middleRows(first, rows) = k;
      l.v.middleRows(first, rows) = v;
      l.hidden_norm.middleRows(first, rows) = scratch.normed.rowwise().norm();
      if (r.keeps_hidden) {
        l.hidden.middleRows(first, rows) = scratch.normed;
      }
      out = causal_attention(q, l.k.topRows(first + rows), l.v.topRows(first + rows),
                             c.attention(layer), static_cast<index_t>(first));
      if (streams != nullptr) {
        streams->push_back(scratch.stream);
      }
    };
    model.forward(scratch, tokens.subspan(as_size(begin), as_size(rows)),
                  static_cast<index_t>(first), attend, logits, kept == logits_of::last);
    r.logits.middleRows(kept == logits_of::all ? begin : 0, logits.rows()) = logits;
  }
}

record prefill(const decoder& model, std::span<const int> tokens, logits_of kept, index_t chunk,
               bool keeps_hidden) {
  record r{.layers = {}, .logits = {}, .keeps_hidden = keeps_hidden};
  extend(model, r, tokens, kept, chunk);
  return r;
}

}  // namespace engine
