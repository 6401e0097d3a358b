// SPDX-License-Identifier: MIT
/// EMS: the scores of tokens, and the weights of the entries that they share. By a block.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"
#include "kvmeld/cuda/policies/ems/table.cuh"

namespace kvmeld::cuda::detail {

/// What EMS's tokens and entries are weighed in.
struct entry_scratch {
  float *key_length, *value_length, *weight;  ///< [heads, capacity]
  float *score, *raw;                         ///< [heads, names] of tokens; before pooling
  index_t *order, *spare, *freed, *mark;      ///< [heads, names]
  float* turned;  ///< [heads, capacity, 2, pitch] or null: keys as they are
  index_t places, names, pitch;

  KVMELD_DEVICE std::ptrdiff_t at(index_t h, index_t token) const {
    return std::ptrdiff_t{h} * names + token;
  }
};

/// Every entry's sum of `score_of(token)`, into `weight`. A thread an entry.
template <index_t Threads, class ScoreOf>
KVMELD_DEVICE void sum_of_tokens(const entry_table& tokens, float* weight, index_t n,
                                 ScoreOf score_of) {
  KVMELD_ROLLED
  for (index_t s = thread_index(); s < n; s += Threads) {
    float sum = 0;
    tokens.each(s, [&](index_t t) { sum += score_of(t); });
    weight[s] = sum;
  }
}

/// s_loc
KVMELD_DEVICE inline float local_score(const entry_table& tokens, index_t t) {
  return tokens.at(entry_table::past, t) + tokens.at(entry_table::current, t);
}

/// Eq. 2, every token's s = max(s_glo · mean(s_loc)/mean(s_glo), s_loc), the means over all tokens
/// held, into `to.score`, and every entry's sum of them into `to.weight`. Walks tokens twice.
template <index_t Threads>
KVMELD_DEVICE void score_tokens(of_warps<double, Threads>& shared, const entry_table& tokens,
                                const entry_scratch& to, index_t h, index_t n) {
  double all = 0, in_windows = 0;
  KVMELD_ROLLED
  for (index_t s = thread_index(); s < n; s += Threads) {
    tokens.each(s, [&](index_t t) {
      const float glo = tokens.at(entry_table::all, t), loc = local_score(tokens, t);
      if (glo + loc == glo + loc) {
        all += static_cast<double>(glo), in_windows += static_cast<double>(loc);
      }
    });
  }
  all = block_sum(shared, all), in_windows = block_sum(shared, in_windows);
  const auto scale = static_cast<float>(all > 0 ? in_windows / all : 0.0);
  float* const score = to.score + to.at(h, 0);
  sum_of_tokens<Threads>(tokens, to.weight + tokens.head.first, n, [&](index_t t) {
    const float glo = tokens.at(entry_table::all, t) * scale, loc = local_score(tokens, t);
    return score[t] = glo < loc ? loc : glo;
  });
}

}  // namespace kvmeld::cuda::detail
