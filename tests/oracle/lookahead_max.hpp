// SPDX-License-Identifier: MIT
// Lookahead-max: what a second reading of a prompt would look up, from the prompt's own queries
// moved behind it.
//
// Readings that the library follows:
//  - Query i of the n that are given moves to N + floor(horizon i / n), N the tokens seen so far.
//  - Every moved query sees every slot; log-mass is part of every logit. ALiBi's term is that of
//  the
//    position that it moved to.
//  - Z adds what the query found in its own reading: the slots at or before its own position. A
//    query that saw none adds nothing. The sink is there once, in that first reading.
//  - With leverage: s_j times lev_j over the mean leverage of all slots; where that is 0, s_j
//  alone.
//  - A prompt in chunks: each chunk's queries score the slots held then; a slot's score is the
//    largest that it had.
#pragma once

#include "oracle/lookahead.hpp"

namespace oracle {

struct lookahead_max {
  int horizon = 64;
  rope rotation = {};
  bool outliers = true;  // times the leverage
  double leverage_ridge = 1;

  /// `own [n][group]`: log-sum-exp of each query's causal logits, the sink's included.
  static mat own_log_sums(const head& h, const tensor& queries, const std::vector<int>& at) {
    mat own;
    for (std::size_t i = 0; i < queries.size(); ++i)
      own.push_back(attend(h, queries[i], at[i]).lse);
    return own;
  }

  /// s [slots] by `queries` [n][group][dim] at `positions` [n] (empty: the last n), `next` the
  /// tokens seen so far.
  vec operator()(const head& h, const tensor& queries, const std::vector<int>& positions,
                 int next) const {
    const std::vector<int> at = positions_or_last(h, queries.size(), positions);
    return with(h, queries, at, own_log_sums(h, queries, at), next);
  }
  /// The same with what each query found in its own reading; those of an infinite one score
  /// nothing.
  vec with(const head& h, const tensor& queries, const std::vector<int>& at, const mat& own,
           int next) const {
    const std::vector<bool> all(h.slots.size(), true);
    const auto n = static_cast<long>(queries.size());
    vec score(h.slots.size(), 0.0);
    for (std::size_t g = 0; g < static_cast<std::size_t>(h.group); ++g) {
      vec most(h.slots.size(), 0.0);
      for (std::size_t i = 0; i < queries.size(); ++i) {
        if (own[i][g] == std::numeric_limits<double>::infinity()) continue;
        const int to = next + static_cast<int>(long{horizon} * static_cast<long>(i) / n);
        const vec again = logits_of(h, rotated(queries[i][g], to - at[i], rotation), g, to);
        double z = 0;  // what it found in its own reading weighs as a sink does
        softmax(again, all, z, own[i][g]);
        for (std::size_t j = 0; j < most.size(); ++j)
          most[j] = std::max(most[j], std::exp(again[j] - z));
      }
      for (std::size_t j = 0; j < most.size(); ++j) score[j] += most[j] / h.group;
    }
    for (std::size_t j = 0; j < score.size(); ++j)
      score[j] *= std::sqrt(dot(h.slots[j].value, h.slots[j].value));
    if (outliers) {
      const vec lever = leverage(unrotated_keys(h, rotation), leverage_ridge);
      double mean = 0;
      for (const double l : lever) mean += l / static_cast<double>(lever.size());
      for (std::size_t j = 0; j < score.size() && mean > 0; ++j) score[j] *= lever[j] / mean;
    }
    return score;
  }
};

}  // namespace oracle
