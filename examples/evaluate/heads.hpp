// SPDX-License-Identifier: MIT
/// What attention heads look at while an answer is written: the fact, the latest tokens, or the
/// first ones.
#pragma once

#include <vector>

#include "engine/prefill.hpp"

namespace evaluate {

using engine::index_t;

/// Shares of a query head's attention; what is left goes to the rest of the prompt.
struct head_stats {
  double retrieval = 0;  ///< on the fact that is asked for
  double local = 0;      ///< on the latest `local_tokens`
  double sink = 0;       ///< on the first `sink_tokens`
};

inline constexpr index_t local_tokens = 32, sink_tokens = 4;

/// Of the last `count` queries of `r`, `[layers · query heads]`: full causal attention. The fact
/// takes the tokens `fact` and on.
std::vector<head_stats> head_stats_of(const engine::config& shape, const engine::record& r,
                                      index_t count, index_t fact, index_t fact_tokens);

/// KV heads `[layers · KV heads]`, those first that look at facts most: as much as the query head
/// of theirs that does so most.
std::vector<index_t> by_retrieval(const std::vector<head_stats>& stats, index_t group);

}  // namespace evaluate
