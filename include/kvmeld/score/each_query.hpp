// SPDX-License-Identifier: MIT
/// A prompt's attention one query after another, for scores that column sums do not give.
#pragma once

#include <algorithm>  // std::min
#include <limits>     // std::numeric_limits
#include <span>

#include "kvmeld/score/dense.hpp"
#include "kvmeld/score/softmax.hpp"

namespace kvmeld {
inline namespace v0 {
namespace score {

/// Calls `see(attention, position, visible)` for every query in turn: its softmax over the
/// `visible` slots at or before its position, 0 elsewhere, the group's heads combined (`sum` or
/// `mean`). `attention` ends behind the last slot that a query sees. Blocked: memory `O(length)`.
template <class T, class See>
void for_each_query(const kv_head auto& head, const query_view<T>& queries, group_combine combine,
                    See see) {
  const dense::matrix keys = dense::keys(head);
  const dense::vector log_mass = dense::log_mass(head);
  const index_t n = head.length(), group = head.group(), most = std::max(index_t{1}, 64 / group);
  dense::matrix p;
  for (index_t first = 0; first < queries.count; first += most) {
    query_view<T> block = queries;
    block.data += first * queries.row;
    block.count = std::min(most, queries.count - first);
    const auto position_of = [&](index_t i) {
      return queries.position_of(first + i, head.next_position());
    };
    index_t earliest = position_of(0), latest = earliest;
    for (index_t i = 1; i < block.count; ++i) {
      earliest = std::min(earliest, position_of(i)), latest = std::max(latest, position_of(i));
    }
    index_t all = 0, reach = n;  // all of the block's queries see slots before `all`, none behind
    while (all < n && head.position(all) <= earliest) {
      ++all;
    }
    while (reach > all && head.position(reach - 1) > latest) {
      --reach;
    }
    p.resize(Eigen::Index{group} * block.count, reach);
    dense::set_product_transposed(head.scale(), dense::queries(block, group, head.dim()),
                                  keys.topRows(reach), p);
    for (index_t i = 0; i < block.count; ++i) {
      index_t visible = all;
      for (index_t s = all; s < reach; ++s) {
        visible += head.position(s) <= position_of(i) ? 1 : 0;
      }
      for (index_t g = 0; g < group; ++g) {
        auto row = p.row(Eigen::Index{g} * block.count + i);
        if (visible == 0) {
          row.setZero();
          continue;
        }
        row += log_mass.head(reach).transpose();
        for (index_t s = all; s < reach; ++s) {
          row[s] =
              head.position(s) <= position_of(i) ? row[s] : -std::numeric_limits<float>::infinity();
        }
        softmax<> of_row;
        of_row.take(row.array());
        row /= of_row.sum;
        if (g > 0) {
          p.row(i) += row;
        }
      }
      if (combine == group_combine::mean) {
        p.row(i) /= static_cast<float>(group);
      }
      see(std::span<const float>(p.row(i).data(), static_cast<std::size_t>(reach)), position_of(i),
          visible);
    }
  }
}

}  // namespace score
}  // namespace v0
}  // namespace kvmeld
