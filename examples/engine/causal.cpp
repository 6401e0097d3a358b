// SPDX-License-Identifier: MIT
#include "engine/causal.hpp"

#include <algorithm>  // std::min
#include <cmath>      // std::sqrt

namespace engine {

void causal_attention(const matrix_view& q, const matrix_view& k, const matrix_view& v,
                      index_t heads, index_t kv_heads, index_t dim, index_t first,
                      row_major_matrix& out) {
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
  out.resize(tokens, q.cols());
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
}

row_major_matrix causal_attention(const matrix_view& q, const matrix_view& k, const matrix_view& v,
                                  index_t heads, index_t kv_heads, index_t dim, index_t first) {
  row_major_matrix out;
  causal_attention(q, k, v, heads, kv_heads, dim, first, out);
  return out;
}

}  // namespace engine
