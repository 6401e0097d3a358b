// SPDX-License-Identifier: MIT
/// What of a prompt will be asked for: a number for every slot of a head, comparable over all heads
/// of a model.
#pragma once

#include <span>

#include "kvmeld/score/leverage.hpp"
#include "kvmeld/score/lookahead_max.hpp"

namespace kvmeld {
inline namespace v0 {

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
