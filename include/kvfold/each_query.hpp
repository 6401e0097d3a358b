/// A prompt's attention one query after another, for scores that column sums do not give.
#pragma once

#include <algorithm>  // std::min
#include <limits>     // std::numeric_limits
#include <span>

#include "kvfold/dense.hpp"

namespace kvfold {

/// Calls `see(attention [length], position, visible)` for every query in turn: its softmax over the
/// `visible` slots at or before its position, 0 elsewhere, the group's heads combined (`sum` or
/// `mean`). Blocked: memory `O(length)`.
template <class T, class See>
void for_each_query(const kv_head auto& head, const query_view<T>& queries, group_combine combine,
                    See see) {
  const dense::matrix keys = dense::keys(head);
  const dense::vector log_mass = dense::log_mass(head);
  const index_t group = head.group(), most = std::max(index_t{1}, 64 / group);
  dense::matrix p;
  for (index_t first = 0; first < queries.count; first += most) {
    query_view<T> block = queries;
    block.data += first * queries.row;
    block.count = std::min(most, queries.count - first);
    p.noalias() = head.scale() * (dense::queries(block, group, head.dim()) * keys.transpose());
    p.rowwise() += log_mass.transpose();
    for (index_t i = 0; i < block.count; ++i) {
      const index_t position = queries.position_of(first + i, head.seen());
      index_t visible = 0;
      for (index_t g = 0; g < group; ++g) {
        auto row = p.row(Eigen::Index{g} * block.count + i);
        visible = 0;
        for (index_t s = 0; s < head.length(); ++s) {
          const bool seen = head.position(s) <= position;
          visible += seen ? 1 : 0;
          row[s] = seen ? row[s] : -std::numeric_limits<float>::infinity();
        }
        if (visible == 0) {
          row.setZero();
          continue;
        }
        row = (row.array() - row.maxCoeff()).exp();
        row /= row.sum();
        if (g > 0) {
          p.row(i) += row;
        }
      }
      if (combine == group_combine::mean) {
        p.row(i) /= static_cast<float>(group);
      }
      see(std::span<const float>(&p(i, 0), static_cast<std::size_t>(head.length())), position,
          visible);
    }
  }
}

}  // namespace kvfold
