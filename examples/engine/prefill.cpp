// SPDX-License-Identifier: MIT
#include "engine/prefill.hpp"

#include <algorithm>  // std::min
#include <cmath>      // std::sqrt

namespace engine {

row_major_matrix causal_attention(const matrix_view& q, const matrix_view& k, const matrix_view& v,
                                  index_t heads, index_t kv_heads, index_t dim, index_t first) {
  const Eigen::Index tokens = q.rows(), seen = first + tokens;
  expects(heads > 0 && kv_heads > 0 && heads % kv_heads == 0,
          "causal_attention: expected a multiple of the KV heads, got ", heads, " heads for ",
          kv_heads, " KV heads");
  expects(q.cols() == Eigen::Index{heads} * dim, "causal_attention: expected q [", tokens, ", ",
          heads * dim, "], got [", q.rows(), ", ", q.cols(), "]");
  for (const auto* m : {&k, &v}) {
    expects(m->rows() == seen && m->cols() == Eigen::Index{kv_heads} * dim,
            "causal_attention: expected k and v [", seen, ", ", kv_heads * dim, "], got [",
            m->rows(), ", ", m->cols(), "]");
  }
  constexpr Eigen::Index block = 64;  // queries at a time: their scores stay in the cache
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  const index_t group = heads / kv_heads;
  row_major_matrix scores(std::min(block, tokens), seen);
  Eigen::VectorXf sums(scores.rows());
  row_major_matrix out(tokens, q.cols());
  for (index_t head = 0; head < heads; ++head) {
    const auto keys = k.middleCols(Eigen::Index{head / group} * dim, dim);
    const auto values = v.middleCols(Eigen::Index{head / group} * dim, dim);
    const Eigen::Index column = Eigen::Index{head} * dim;
    for (Eigen::Index begin = 0; begin < tokens; begin += block) {
      const Eigen::Index rows = std::min(block, tokens - begin), length = first + begin + rows;
      auto p = scores.topLeftCorner(rows, length);
      p.noalias() = q.block(begin, column, rows, dim) * keys.topRows(length).transpose();
      for (Eigen::Index r = 0; r < rows; ++r) {
        const Eigen::Index visible = first + begin + r + 1;
        auto row = p.row(r).head(visible).array();
        row = ((row - row.maxCoeff()) * scale).exp();
        sums(r) = row.sum();
        p.row(r).tail(length - visible).setZero();
      }
      auto result = out.block(begin, column, rows, dim);
      result.noalias() = p * values.topRows(length);
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
      out = causal_attention(q, l.k.topRows(first + rows), l.v.topRows(first + rows), c.heads,
                             c.kv_heads, c.dim, static_cast<index_t>(first));
      if (streams != nullptr) {
        streams->push_back(scratch.stream);
      }
    };
    model.forward(scratch, tokens.subspan(as_size(begin), as_size(rows)),
                  static_cast<index_t>(first), attend, logits, kept == logits_of::last);
    r.logits.middleRows(kept == logits_of::all ? begin : 0, logits.rows()) = logits;
  }
}

record prefill(const decoder& model, std::span<const int> tokens, logits_of kept, index_t chunk) {
  record r;
  extend(model, r, tokens, kept, chunk);
  return r;
}

}  // namespace engine
