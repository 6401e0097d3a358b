// SPDX-License-Identifier: MIT
/// What attention heads look at while an answer is written: the fact, the latest tokens, or the
/// first ones.
#pragma once

#include <algorithm>  // std::max, std::ranges::stable_sort
#include <cmath>      // std::sqrt
#include <numeric>    // std::iota
#include <vector>

#include "engine/prefill.hpp"

namespace evaluate {

using engine::as_size;
using engine::count_of;
using engine::index_t;

/// Shares of a query head's attention; what is left goes to the rest of the prompt.
struct head_stats {
  double retrieval = 0;  ///< on the fact that is asked for
  double local = 0;      ///< on the latest `local_tokens`
  double sink = 0;       ///< on the first `sink_tokens`
};

inline constexpr index_t local_tokens = 32, sink_tokens = 4;

/// Of the last `count` queries of `r`, `[full layers · query heads]`: causal attention. The fact
/// takes the tokens `fact` and on.
inline std::vector<head_stats> head_stats_of(const engine::config& shape, const engine::record& r,
                                             index_t count, index_t fact, index_t fact_tokens) {
  std::vector<head_stats> stats;
  const double scale = 1 / std::sqrt(static_cast<double>(shape.dim));
  for (const index_t layer : shape.full_layers()) {
    const engine::layer_record& l = r.layers[as_size(layer)];
    const Eigen::Index tokens = l.q.rows();
    for (index_t h = 0; h < shape.heads; ++h) {
      head_stats& mean = stats.emplace_back();
      const auto keys = l.k.middleCols(Eigen::Index{h / shape.group()} * shape.dim, shape.dim);
      for (Eigen::Index t = tokens - count; t < tokens; ++t) {
        Eigen::VectorXd logits =
            scale * (keys.topRows(t + 1) *
                     l.q.row(t).segment(Eigen::Index{h} * shape.dim, shape.dim).transpose())
                        .cast<double>();
        if (shape.soft_cap > 0) {
          logits = (logits.array() / shape.soft_cap).tanh() * double{shape.soft_cap};
        }
        const Eigen::VectorXd p = (logits.array() - logits.maxCoeff()).exp();
        const double part = 1 / p.sum() / count;
        mean.retrieval += part * p.segment(fact, fact_tokens).sum();
        mean.local += part * p.tail(std::min<Eigen::Index>(local_tokens, t + 1)).sum();
        mean.sink += part * p.head(std::min<Eigen::Index>(sink_tokens, t + 1)).sum();
      }
    }
  }
  return stats;
}

/// KV heads `[full layers · KV heads]`, those first that look at facts most: as much as the query
/// head of theirs that does so most.
inline std::vector<index_t> by_retrieval(const std::vector<head_stats>& stats, index_t group) {
  const auto heads = count_of(stats) / group;
  std::vector<double> most(as_size(heads));
  for (std::size_t i = 0; i < stats.size(); ++i) {
    double& x = most[i / as_size(group)];
    x = std::max(x, stats[i].retrieval);
  }
  std::vector<index_t> order(most.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(
      order, [&](index_t a, index_t b) { return most[as_size(a)] > most[as_size(b)]; });
  return order;
}

/// The mean over cases, `[full layers · query heads]`; empty: there are none.
inline std::vector<head_stats> mean_head_stats(const std::vector<std::vector<head_stats>>& cases) {
  std::vector<head_stats> mean(cases.empty() ? 0 : cases.front().size());
  const auto n = static_cast<double>(cases.size());
  for (const auto& stats : cases) {
    for (std::size_t i = 0; i < mean.size(); ++i) {
      mean[i].retrieval += stats[i].retrieval / n;
      mean[i].local += stats[i].local / n;
      mean[i].sink += stats[i].sink / n;
    }
  }
  return mean;
}

}  // namespace evaluate
