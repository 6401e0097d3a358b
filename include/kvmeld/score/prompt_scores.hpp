// SPDX-License-Identifier: MIT
/// How likely each slot of a prompt is to be retrieved: a number, comparable over all heads of a
/// model.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::min
#include <cstdint>    // std::int64_t
#include <limits>     // std::numeric_limits
#include <span>
#include <vector>

#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/score/column_scores.hpp"
#include "kvmeld/score/leverage.hpp"
#include "kvmeld/score/screened_scores.hpp"
#include "kvmeld/score/tile_products.hpp"

namespace kvmeld::inline v0 {
namespace score {

/// A second pass's query is the prompt's own, shifted to after the prompt: content repeats,
/// rotation does not. Query `i` of `n` goes to position `t_i = N + horizon · i / n`, `N` tokens
/// seen so far:
///
///     a_gij = scale · R(q_gi, t_i − position_i) · k_j + β_j                    over all slots j
///     Z_gi  = ln( Σ_j exp a_gij + Σ_{j seen by i} exp(scale · q_gi · k_j + β_j) )
///     s_j   = ‖v_j‖ · mean_g max_i exp(a_gij − Z_gi)                            into `out
///     [length]`
///
/// with the model's other terms (`attention_spec`). The second sum is the row's own log-sum-exp
/// `[group, queries]` of the prompt's causal attention, a sink in it: the queries' `log_sum_exp`,
/// or computed. All queries count: a needle is retrieved by the one token before it. Blocked:
/// memory `O(length)`.
template <kv_head Head, class Query>
void lookahead_max(const Head& head, const query_view<Query>& queries, index_t horizon,
                   std::span<float> out) {
  const index_t n = head.length(), group = head.group(), count = queries.count;
  query_blocks<Head, Query> block(head, queries);
  dense::matrix_of<float> best = dense::matrix_of<float>::Zero(group, block.columns());
  Eigen::ArrayXf own(block.most_rows());  // of each row, its first pass's log-sum-exp
  rotation turn(head.spec().rope, head.dim());
  const auto moved_to = [&](index_t r) {
    return moved_position(head.next_position(), horizon, block.query(r), count);
  };
  block.each([&] {
    const index_t visible = block.knows_log_sums() ? 0 : block.visible();
    block.multiply(visible);
    for (index_t r = 0; r < block.rows(); ++r) {
      softmax<> seen = block.sink(r);
      if (visible > 0) {
        seen = block.exponentials(r, visible, block.position(r), seen);
      }
      own[r] = block.knows_log_sums() ? block.log_sum(r) : seen.log_sum_exp();
      if (r % group == 0) {
        turn.by(1.0 * moved_to(r) - block.position(r));
      }
      turn(block.q(r));
    }
    block.multiply(n);
    for (index_t r = 0; r < block.rows(); ++r) {
      const softmax<> moved = block.exponentials(r, n, moved_to(r));
      softmax<> both = moved;
      both.merge({own[r], 1});
      if (moved.max != moved.nothing) {
        auto largest = best.row(r % group).array();
        largest = largest.max(block.row_of(r, n).transpose() * (moved.below(both.max) / both.sum));
      }
    }
  });
  for (index_t s = 0; s < n; ++s) {
    out[as_size(s)] =
        norm(head.value(s), head.value_dim()) * best.col(s).sum() / static_cast<float>(group);
  }
}

}  // namespace score

/// How `prompt_scores` measures.
struct prompt_score_options {
  /// Queries are shifted to so many positions after the prompt at most, evenly: about where a
  /// question will stand.
  index_t horizon = 64;
  bool leverage = true;      ///< times the leverage of the un-rotated key, over its mean
  float leverage_ridge = 1;  ///< relative to the mean variance of the keys' dimensions
  bool screened = false;     ///< by `score::screened_max`, where that can be
};

/// Lookahead-max (ours; `score::lookahead_max` has the formula) times leverage, of one KV head's
/// slots, at least 0, into `out [length]`. `queries`: the prompt's own of that head, all of them,
/// rotated (`prompt_queries(...).of(h)`), after its keys and values were appended; of a prompt in
/// chunks, the chunk's. With `log_sum_exp` half of the work is saved. Refused: an empty head, no
/// queries, a span of another size, a horizon below 0.
template <class Query>
void prompt_scores(const head_ref& head, const query_view<Query>& queries,
                   const prompt_score_options& options, std::span<float> out) {
  const index_t n = head.length(), count = queries.count;
  expects(n > 0, "prompt_scores: expected at least 1 slot, got an empty head");
  expects(count > 0 && queries.data != nullptr, "prompt_scores: expected at least 1 query, got ",
          queries.data == nullptr ? 0 : count);
  expects(out.size() == as_size(n), "prompt_scores: expected scores [", n, "], got ", out.size(),
          " floats");
  expects(options.horizon >= 0, "prompt_scores: expected a horizon of at least 0 positions, got ",
          options.horizon);
  if (!options.screened || !score::screened_max(head, queries, options.horizon, out)) {
    score::lookahead_max(head, queries, options.horizon, out);
  }
  if (!options.leverage) {
    return;
  }
  std::vector<float> scratch;
  const auto of_keys = score::leverage_of_keys(
      head, options.leverage_ridge, [](index_t) { return true; }, scratch);
  const float mean = Eigen::Map<const dense::vector>(of_keys.data(), n).mean();
  for (std::size_t s = 0; s < out.size(); ++s) {
    out[s] *= mean > 0 ? of_keys[s] / mean : 1.0F;  // 0: all keys are alike
  }
}

}  // namespace kvmeld::inline v0
