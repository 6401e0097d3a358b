// SPDX-License-Identifier: MIT
/// What of a prompt will be asked for: a number for every slot of a head, comparable over all heads
/// of a model.
#pragma once

#include <Eigen/Core>
#include <algorithm>  // std::min
#include <cmath>      // std::log1p
#include <cstdint>    // std::int64_t
#include <limits>     // std::numeric_limits
#include <span>
#include <vector>

#include "kvmeld/detail/product.hpp"
#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/memory/tile.hpp"
#include "kvmeld/score/leverage.hpp"
#include "kvmeld/score/queries.hpp"
#include "kvmeld/score/softmax.hpp"
#include "kvmeld/score/tile_products.hpp"

namespace kvmeld {
inline namespace v0 {
namespace score {

/// A second reading's query is the prompt's own, moved behind the prompt: content repeats, rotation
/// does not. Query `i` of `n` goes to position `t_i = N + horizon · i / n`, `N` tokens seen so far:
///
///     a_gij = scale · R(q_gi, t_i − position_i) · k_j + β_j                    over all slots j
///     Z_gi  = ln( Σ_j exp a_gij + Σ_{j seen by i} exp(scale · q_gi · k_j + β_j) )
///     s_j   = ‖v_j‖ · mean_g max_i exp(a_gij − Z_gi)                            into `out
///     [length]`
///
/// The second sum is the row's own log-sum-exp `[group, queries]` of the prompt's causal attention:
/// `log_sum_exp`, where the prefill has it; computed if empty. All queries count: a fact is looked
/// up by the one token before it. Blocked: memory `O(length)`.
template <kv_head Head, class Query>
void lookahead_max(const Head& head, const query_view<Query>& queries, index_t horizon,
                   std::span<const float> log_sum_exp, std::span<float> out) {
  using matrix = dense::matrix_of<float>;
  constexpr index_t slots_a_tile = 512, padding = 16;
  constexpr float lowest = -std::numeric_limits<float>::infinity();
  const index_t n = head.length(), dim = head.dim(), group = head.group(), count = queries.count;
  const index_t queries_a_block = std::max(index_t{1}, 64 / group), most = queries_a_block * group;
  const index_t padded = (n + padding - 1) / padding * padding;
  matrix q(most, dim), e(most, padded), best = matrix::Zero(group, padded);
  Eigen::ArrayXf own(most);  // of each row, its first reading's log-sum-exp
  std::vector<float> buffer(static_cast<std::size_t>(slots_a_tile) * static_cast<std::size_t>(dim));
  rotation turn(head.spec().rope, dim);
  const auto multiply = [&](index_t rows, index_t slots) {
    for (index_t s0 = 0; s0 < slots; s0 += slots_a_tile) {
      const index_t width = std::min(slots_a_tile, slots - s0);
      const auto keys = detail::load_keys(head, s0, width, buffer.data());
      dense::set_product_transposed(head.scale(), q.topRows(rows), keys,
                                    e.block(0, s0, rows, width));
    }
  };
  // The row's exp below its largest logit; over whole vectors.
  const auto exponentials = [&](index_t r, index_t slots) {
    const index_t width = (slots + padding - 1) / padding * padding;
    std::fill(e.row(r).data() + slots, e.row(r).data() + width, lowest);
    softmax<> all;
    all.take(e.row(r).head(width).array());
    return all;
  };

  for (index_t i0 = 0; i0 < count; i0 += queries_a_block) {
    const index_t block = std::min(queries_a_block, count - i0), rows = block * group;
    const auto position_of = [&](index_t i) {
      return queries.position_of(i0 + i, head.next_position());
    };
    index_t last_position = -1;
    for (index_t i = 0; i < block; ++i) {
      last_position = std::max(last_position, position_of(i));
      for (index_t g = 0; g < group; ++g) {
        const Eigen::Index r = Eigen::Index{i} * group + g;
        q.row(r) =
            Eigen::Map<const Eigen::Matrix<Query, 1, Eigen::Dynamic>>(queries.at(g, i0 + i), dim)
                .template cast<float>();
        own[r] = log_sum_exp.empty()
                     ? lowest
                     : log_sum_exp[static_cast<std::size_t>(std::ptrdiff_t{g} * count + i0 + i)];
      }
    }
    if (log_sum_exp.empty()) {  // the first reading, over the slots that each query sees
      index_t visible = n;
      while (visible > 0 && head.position(visible - 1) > last_position) {
        --visible;
      }
      multiply(rows, visible);
      for (index_t r = 0; visible > 0 && r < rows; ++r) {
        const index_t position = position_of(r / group);
        float* const logit = e.row(r).data();
        for (index_t s = 0; s < visible; ++s) {
          const float l = logit[s] + head.log_mass(s);
          logit[s] = head.position(s) <= position ? l : lowest;
        }
        own[r] = exponentials(r, visible).log_sum_exp();
      }
    }
    for (index_t i = 0; i < block; ++i) {
      const auto ahead =
          static_cast<index_t>(std::int64_t{horizon} * (std::int64_t{i0} + i) / count);
      turn.by(1.0 * head.next_position() + ahead - position_of(i));
      for (index_t g = 0; g < group; ++g) {
        turn(&q(Eigen::Index{i} * group + g, 0));
      }
    }
    multiply(rows, n);
    for (index_t r = 0; r < rows; ++r) {
      float* const logit = e.row(r).data();
      for (index_t s = 0; s < n; ++s) {
        logit[s] += head.log_mass(s);
      }
      const softmax<> moved = exponentials(r, n);
      softmax<> both = moved;
      both.merge({own[r], 1});
      if (moved.max != lowest) {
        auto largest = best.row(r % group).array();
        largest = largest.max(e.row(r).array() * (moved.below(both.max) / both.sum));
      }
    }
  }
  for (index_t s = 0; s < n; ++s) {
    out[static_cast<std::size_t>(s)] =
        norm(head.value(s), dim) * best.col(s).sum() / static_cast<float>(group);
  }
}

}  // namespace score

struct prompt_score_options {
  /// Queries are moved so many positions behind the prompt at most, evenly: about where a question
  /// will stand.
  index_t horizon = 64;
  bool leverage = true;      ///< times the leverage of the un-rotated key, over its mean
  float leverage_ridge = 1;  ///< relative to the mean variance of the keys' dimensions
  std::span<const float> log_sum_exp = {};  ///< [group, queries] of the prefill's own attention
};

/// Lookahead-max (ours; `score/lookahead_max.hpp` has the formula) times leverage, of one KV head's
/// slots, at least 0, into `out [length]`. `queries`: the prompt's own of that head, all of them,
/// rotated (`prompt_queries(...).of(h)`), after its keys and values were appended; of a prompt in
/// chunks, the chunk's. Where the prefill has its rows' log-sum-exp, half of
/// the work is saved.
/// Refused: an empty head, no queries, spans of another size, a horizon below 0.
template <class Query>
void prompt_scores(const head_ref& head, const query_view<Query>& queries,
                   const prompt_score_options& options, std::span<float> out) {
  const index_t n = head.length(), count = queries.count;
  expects(n > 0, "prompt_scores: expected at least 1 slot, got an empty head");
  expects(count > 0 && queries.data != nullptr, "prompt_scores: expected at least 1 query, got ",
          queries.data == nullptr ? 0 : count);
  expects(out.size() == static_cast<std::size_t>(n), "prompt_scores: expected scores [", n,
          "], got ", out.size(), " floats");
  expects(options.log_sum_exp.empty() ||
              options.log_sum_exp.size() ==
                  static_cast<std::size_t>(head.group()) * static_cast<std::size_t>(count),
          "prompt_scores: expected log_sum_exp [", head.group(), ", ", count, "], got ",
          options.log_sum_exp.size(), " floats");
  expects(options.horizon >= 0, "prompt_scores: expected a horizon of at least 0 positions, got ",
          options.horizon);
  score::lookahead_max(head, queries, options.horizon, options.log_sum_exp, out);
  if (!options.leverage) {
    return;
  }
  std::vector<float> scratch;
  const auto leverage = score::leverage_of_keys(head, options.leverage_ridge, scratch);
  const float mean = Eigen::Map<const dense::vector>(leverage.data(), n).mean();
  for (std::size_t s = 0; mean > 0 && s < out.size(); ++s) {  // 0: all keys are alike
    out[s] *= leverage[s] / mean;
  }
}

}  // namespace v0
}  // namespace kvmeld
