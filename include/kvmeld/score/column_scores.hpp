// SPDX-License-Identifier: MIT
/// Column sums of a prompt's causal attention, without ever holding the attention.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::min
#include <cmath>      // std::pow
#include <limits>     // std::numeric_limits
#include <span>
#include <vector>

#include "kvmeld/detail/product.hpp"
#include "kvmeld/memory/tile.hpp"
#include "kvmeld/score/queries.hpp"
#include "kvmeld/score/scorers.hpp"
#include "kvmeld/score/softmax.hpp"

namespace kvmeld {
inline namespace v0 {

/// What to sum, and over which queries.
struct column_options {
  index_t window = 0;                          ///< last queries that `window` sums over
  float decay = 1;                             ///< λ of `decayed`
  group_combine combine = group_combine::sum;  ///< of the group's query heads, per query
  std::span<const float> log_sum_exp = {};  ///< [group, queries] of ℓ, if attention computed it
};

/// Where the sums go: each `[length]` is overwritten, or empty: not wanted.
struct column_sums {
  std::span<float> total = {};    ///< Σ_i a_ij
  std::span<float> window = {};   ///< the same over the last `window` queries
  std::span<float> decayed = {};  ///< Σ_i λ^(n−1−i) a_ij
  std::span<float> largest = {};  ///< the largest a_ij of all queries and query heads, not combined
};

/// `a_ij = softmax_j(scale · q_i·k_j + log_mass_j)` over the slots at or before query `i`'s
/// position; the group's heads combined; summed over queries `i = 0 … n−1` of one KV head, or the
/// largest of them. Blocked: memory `O(length)`. A query that sees no slot adds nothing.
/// Refused: an empty head, spans of another size, a decay outside (0, 1].
template <kv_head Head, class Query>
void column_scores(const Head& head, const query_view<Query>& queries,
                   const column_options& options, const column_sums& out) {
  using matrix = dense::matrix_of<float>;
  const index_t n = head.length(), dim = head.dim(), group = head.group(), count = queries.count;
  expects(n > 0, "column_scores: expected at least 1 slot, got an empty head");
  expects(count > 0 && queries.data != nullptr, "column_scores: expected at least 1 query, got ",
          queries.data == nullptr ? 0 : count);
  for (const auto& [what, sums] :
       {std::pair{"total", out.total}, std::pair{"window", out.window},
        std::pair{"decayed", out.decayed}, std::pair{"largest", out.largest}}) {
    expects(sums.empty() || sums.size() == static_cast<std::size_t>(n), "column_scores: expected ",
            what, " [", n, "], got ", sums.size(), " floats");
  }
  expects(options.decay > 0 && options.decay <= 1,
          "column_scores: expected a decay in (0, 1], got ", options.decay);
  expects(options.window >= 0, "column_scores: expected a window of at least 0 queries, got ",
          options.window);
  expects(options.log_sum_exp.empty() ||
              options.log_sum_exp.size() ==
                  static_cast<std::size_t>(group) * static_cast<std::size_t>(count),
          "column_scores: expected log_sum_exp [", group, ", ", count, "], got ",
          options.log_sum_exp.size(), " floats");

  constexpr index_t slots_a_tile = 512, padding = 16;
  const index_t queries_a_block = std::max(index_t{1}, 64 / group);
  const index_t most = queries_a_block * group;
  matrix q(most, dim), e(most, (n + padding - 1) / padding * padding);
  matrix weight(3, most), sums = matrix::Zero(3, n);
  Eigen::ArrayXf largest = Eigen::ArrayXf::Zero(out.largest.empty() ? 0 : e.cols());
  std::vector<float> buffer(static_cast<std::size_t>(slots_a_tile) * static_cast<std::size_t>(dim));
  const float lowest = -std::numeric_limits<float>::infinity();

  for (index_t i0 = 0; i0 < count; i0 += queries_a_block) {
    const index_t block = std::min(queries_a_block, count - i0), rows = block * group;
    index_t last_position = -1;
    for (index_t i = 0; i < block; ++i) {
      last_position = std::max(last_position, queries.position_of(i0 + i, head.next_position()));
      for (index_t g = 0; g < group; ++g) {
        q.row(i * group + g) =
            Eigen::Map<const Eigen::Matrix<Query, 1, Eigen::Dynamic>>(queries.at(g, i0 + i), dim)
                .template cast<float>();
      }
    }
    index_t visible = n;  // slots behind the last one that any of these queries sees need no work
    while (visible > 0 && head.position(visible - 1) > last_position) {
      --visible;
    }
    if (visible == 0) {
      continue;  // none of these queries sees a slot
    }
    const index_t padded = (visible + padding - 1) / padding * padding;
    for (index_t s0 = 0; s0 < visible; s0 += slots_a_tile) {
      const index_t slots = std::min(slots_a_tile, visible - s0);
      const auto keys = detail::load_keys(head, s0, slots, buffer.data());
      dense::set_product_transposed(1, q.topRows(rows), keys, e.block(0, s0, rows, slots));
    }
    for (index_t r = 0; r < rows; ++r) {
      const index_t i = i0 + r / group, g = r % group;
      const index_t position = queries.position_of(i, head.next_position());
      float* logit = e.row(r).data();
      for (index_t s = 0; s < visible; ++s) {
        const float l = head.scale() * logit[s] + head.log_mass(s);
        logit[s] = head.position(s) <= position ? l : lowest;
      }
      std::fill(logit + visible, logit + padded, lowest);
      auto mass = e.row(r).head(padded).array();
      score::softmax<> all;
      if (options.log_sum_exp.empty()) {
        all.take(mass);
      } else {
        all = {options.log_sum_exp[static_cast<std::size_t>(g) * static_cast<std::size_t>(count) +
                                   static_cast<std::size_t>(i)],
               1};
        if (all.max != lowest) {
          mass = (mass - all.max).exp();
        } else {
          mass.setZero();
        }
      }
      float inverse = all.max != lowest ? 1.0F / all.sum : 0.0F;
      if (largest.size() > 0) {
        largest.head(padded) = largest.head(padded).max(mass.transpose() * inverse);
      }
      if (options.combine == group_combine::mean) {
        inverse /= static_cast<float>(group);
      }
      weight(0, r) = inverse;
      weight(1, r) = i >= count - options.window ? inverse : 0.0F;
      weight(2, r) = inverse * static_cast<float>(std::pow(double{options.decay}, count - 1 - i));
    }
    if (options.combine == group_combine::max) {  // the largest of a group stands for all of it
      for (index_t i = 0; i < block; ++i) {
        const Eigen::Index first = Eigen::Index{i} * group;
        auto of_group = e.row(first).head(padded).array();
        of_group *= weight(0, first);
        for (Eigen::Index r = first + 1; r < first + group; ++r) {
          of_group = of_group.max(e.row(r).head(padded).array() * weight(0, r));
          weight.col(r).setZero();
        }
        const float age = static_cast<float>(std::pow(double{options.decay}, count - 1 - (i0 + i)));
        weight.col(first) << 1.0F, i0 + i >= count - options.window ? 1.0F : 0.0F, age;
      }
    }
    dense::add_product(1, weight.leftCols(rows), e.block(0, 0, rows, visible),
                       sums.leftCols(visible));
  }
  const auto give = [&](index_t r, std::span<float> to) {
    std::copy_n(sums.row(r).data(), to.size(), to.begin());
  };
  give(0, out.total), give(1, out.window), give(2, out.decayed);
  std::copy_n(largest.data(), out.largest.size(), out.largest.begin());
}

namespace score {

/// Cumulative attention: `score_j ← score_j + Σ_i a_ij`.
template <class Query>
void accumulate(std::span<float> score, const kv_head auto& head, const query_view<Query>& queries,
                group_combine combine = group_combine::sum) {
  std::vector<float> total(static_cast<std::size_t>(head.length()));
  column_scores(head, queries, {.combine = combine}, {.total = total});
  accumulate(score, total);
}

}  // namespace score
}  // namespace v0
}  // namespace kvmeld
