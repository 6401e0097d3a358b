// SPDX-License-Identifier: MIT
#include "evaluate/heads.hpp"

#include <algorithm>  // std::max, std::ranges::stable_sort
#include <cmath>      // std::sqrt
#include <numeric>    // std::iota

namespace evaluate {

std::vector<head_stats> head_stats_of(const engine::config& shape, const engine::record& r,
                                      index_t count, index_t fact, index_t fact_tokens) {
  std::vector<head_stats> stats;
  const double scale = 1 / std::sqrt(static_cast<double>(shape.dim));
  for (const engine::layer_record& l : r.layers) {
    const Eigen::Index tokens = l.q.rows();
    for (index_t h = 0; h < shape.heads; ++h) {
      head_stats& mean = stats.emplace_back();
      const auto keys = l.k.middleCols(Eigen::Index{h / shape.group()} * shape.dim, shape.dim);
      for (Eigen::Index t = tokens - count; t < tokens; ++t) {
        const Eigen::VectorXd logits =
            scale * (keys.topRows(t + 1) *
                     l.q.row(t).segment(Eigen::Index{h} * shape.dim, shape.dim).transpose())
                        .cast<double>();
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

std::vector<index_t> by_retrieval(const std::vector<head_stats>& stats, index_t group) {
  const auto heads = static_cast<index_t>(stats.size()) / group;
  std::vector<double> most(static_cast<std::size_t>(heads));
  for (std::size_t i = 0; i < stats.size(); ++i) {
    double& x = most[i / static_cast<std::size_t>(group)];
    x = std::max(x, stats[i].retrieval);
  }
  std::vector<index_t> order(most.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](index_t a, index_t b) {
    return most[static_cast<std::size_t>(a)] > most[static_cast<std::size_t>(b)];
  });
  return order;
}

}  // namespace evaluate
