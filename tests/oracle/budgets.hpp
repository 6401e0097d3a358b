// SPDX-License-Identifier: MIT
// Budgets of layers and of heads; every function's integers sum to exactly what was asked.
#pragma once

#include <numeric>

#include "oracle/policies.hpp"

namespace oracle {

/// `total` slots in proportion to `weights` (> 0) [n], each share within [least, most]: the reals
/// x_l = clamp(c weights_l, least, most) with the one c that makes them sum to `total` (so what is
/// cut off or filled up is taken from the others in proportion), then largest-remainder rounding:
/// every x_l down, and one more for the largest fractions until the sum holds, ties to the lower
/// index. Throws if n least > total or n most < total.
inline std::vector<int> proportional(const vec& weights, int total, int least, int most) {
  const int n = static_cast<int>(weights.size());
  if (n == 0 || n * least > total || static_cast<long long>(n) * most < total)
    throw std::invalid_argument("oracle: expected a total that the budgets can sum to");
  auto filled = [&](double c) {
    double sum = 0;
    for (const double w : weights) sum += std::clamp(c * w, double(least), double(most));
    return sum;
  };
  double low = 0, high = 1;
  while (filled(high) < total && high < 1e300) high *= 2;
  for (int i = 0; i < 2000 && low < high; ++i) {
    const double c = low + (high - low) / 2;
    if (c == low || c == high) break;
    (filled(c) < total ? low : high) = c;
  }
  // The bisection says which are clamped; among the others the sum is made exact.
  double free_weight = 0, rest = total;
  for (const double w : weights) {
    const double x = high * w;
    if (x > least && x < most)
      free_weight += w;
    else
      rest -= std::clamp(x, double(least), double(most));
  }
  std::vector<int> budget;
  vec fraction;
  for (const double w : weights) {
    double x = std::clamp(high * w, double(least), double(most));
    if (high * w > least && high * w < most)
      x = std::clamp(rest * w / free_weight, double(least), double(most));
    budget.push_back(static_cast<int>(std::floor(x)));
    fraction.push_back(x - std::floor(x));
  }
  std::vector<std::size_t> all(weights.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  const int missing = total - std::accumulate(budget.begin(), budget.end(), 0);
  for (const std::size_t l : top(fraction, all, static_cast<std::size_t>(std::max(missing, 0))))
    ++budget[l];
  return budget;
}

/// D2O's layer budgets (eqs. 4-5 and the authors' code). `variances` [layers][heads]: of each
/// head's column sums of the prompt's attention; `length` S: tokens of the prompt; `total`: slots
/// of all layers together, exempt ones included; `exempt`: layers that keep all S (the authors
/// exempt 0, 1 and the last).
/// F_l: a layer's variances min-max normalised to [0, 1] over its heads (all 0 when they are equal,
/// as for one head), then averaged. Weights exp(-F_l); S_l within [ceil(S/100), S].
inline std::vector<int> layer_budgets(const mat& variances, int length, int total,
                                      const std::vector<int>& exempt = {}) {
  std::vector<int> budget(variances.size(), length);
  std::vector<std::size_t> others;
  vec weights;
  for (std::size_t l = 0; l < variances.size(); ++l) {
    if (std::find(exempt.begin(), exempt.end(), static_cast<int>(l)) != exempt.end()) {
      total -= length;
      continue;
    }
    const double low = *std::min_element(variances[l].begin(), variances[l].end());
    const double high = *std::max_element(variances[l].begin(), variances[l].end());
    double f = 0;
    for (const double x : variances[l])
      f += (high > low ? (x - low) / (high - low) : 0) / static_cast<double>(variances[l].size());
    weights.push_back(std::exp(-f));
    others.push_back(l);
  }
  if (others.empty()) {
    if (total != 0)
      throw std::invalid_argument("oracle: expected a total that the budgets can sum to");
    return budget;
  }
  const std::vector<int> shared = proportional(weights, total, (length + 99) / 100, length);
  for (std::size_t i = 0; i < others.size(); ++i) budget[others[i]] = shared[i];
  return budget;
}

/// PyramidKV (arXiv 2406.02069): an arithmetic progression from the first layer down to the last,
/// whose weight is 1/steepness of the mean; the first has 2 - 1/steepness of it. Each layer within
/// [1, length]. steepness >= 1; 1: all alike.
inline std::vector<int> pyramid_kv(int layers, int length, int total, double steepness = 20) {
  vec weights;
  const double last = 1 / steepness, first = 2 - last;
  for (int l = 0; l < layers; ++l)
    weights.push_back(layers == 1 ? 1 : first + (last - first) * l / (layers - 1));
  return proportional(weights, total, 1, length);
}

/// PyramidInfer (arXiv 2405.12532): cosine decay from weight 1 at the first layer to `least` (in
/// (0, 1]) at the last: least + (1 - least) (1 + cos(pi l / (layers - 1))) / 2. Each layer within
/// [1, length].
inline std::vector<int> pyramid_infer(int layers, int length, int total, double least = 0.2) {
  vec weights;
  for (int l = 0; l < layers; ++l) {
    const double turn = layers == 1 ? 0 : std::acos(-1.0) * l / (layers - 1);
    weights.push_back(least + (1 - least) * (1 + std::cos(turn)) / 2);
  }
  return proportional(weights, total, 1, length);
}

/// AdaKV (arXiv 2407.11550): the budgets of a layer's heads. `scores` [heads][slots]; first each
/// head's own floor(floor_alpha * total / heads) best slots, then the best of all heads' other
/// slots until `total` are chosen; ties to the lower head, then to the lower slot, NaN last. A head
/// gets as many as were chosen of it. Throws if there are fewer slots than `total`.
inline std::vector<int> ada_budgets(const mat& scores, int total, double floor_alpha = 0.2) {
  vec flat;
  std::vector<std::size_t> head_of, rest;
  std::vector<int> budget;
  const auto floor = static_cast<std::size_t>(
      std::floor(floor_alpha * total / static_cast<double>(scores.size())));
  for (std::size_t h = 0; h < scores.size(); ++h) {
    std::vector<std::size_t> own;
    for (const double s : scores[h]) {
      own.push_back(flat.size());
      head_of.push_back(h);
      flat.push_back(s);
    }
    const std::vector<std::size_t> best = top(flat, own, floor);
    budget.push_back(static_cast<int>(best.size()));
    for (const std::size_t j : own)
      if (std::find(best.begin(), best.end(), j) == best.end()) rest.push_back(j);
  }
  const int left = total - std::accumulate(budget.begin(), budget.end(), 0);
  if (left < 0 || left > static_cast<int>(rest.size()))
    throw std::invalid_argument("oracle: expected a total that the budgets can sum to");
  for (const std::size_t j : top(flat, rest, static_cast<std::size_t>(left))) ++budget[head_of[j]];
  return budget;
}

/// One threshold over a model: the `total` best of all heads' slots, of which a head has `most` at
/// most; ties to the lower head, then to the lower slot, NaN last. A head gets as many as were
/// chosen of it. Throws if there are fewer slots than `total`.
inline std::vector<int> global_budgets(const mat& scores, int total, int most) {
  vec flat;
  std::vector<std::size_t> head_of, candidates;
  for (std::size_t h = 0; h < scores.size(); ++h) {
    std::vector<std::size_t> own;
    for (const double s : scores[h]) {
      own.push_back(flat.size());
      head_of.push_back(h);
      flat.push_back(s);
    }
    for (const std::size_t j : top(flat, own, std::min(own.size(), static_cast<std::size_t>(most))))
      candidates.push_back(j);
  }
  if (total < 0 || total > static_cast<int>(candidates.size()))
    throw std::invalid_argument("oracle: expected a total that the budgets can sum to");
  std::sort(candidates.begin(), candidates.end());
  std::vector<int> budget(scores.size(), 0);
  for (const std::size_t j : top(flat, candidates, static_cast<std::size_t>(total)))
    ++budget[head_of[j]];
  return budget;
}

/// Equal slots for the heads of a layer, `scores` [layers][heads][slots]: the r-th composite slot
/// of a layer holds the r-th best slot of each of its heads and scores the mean of theirs
/// (KVCompose); the `total` best composite slots of the model are chosen, at most `most` a layer.
inline std::vector<int> composite_budgets(const std::vector<mat>& scores, int total, int most) {
  mat composite;
  for (const mat& layer : scores) {
    vec mean;
    for (std::size_t r = 0; r < layer.front().size(); ++r) {
      double sum = 0;
      for (const vec& head : layer) {
        // The r-th best: as many are better, or as good and earlier.
        for (std::size_t s = 0; s < head.size(); ++s) {
          std::size_t before = 0;
          for (std::size_t t = 0; t < head.size(); ++t)
            before += head[t] > head[s] || (head[t] == head[s] && t < s) ? 1 : 0;
          if (before == r) sum += head[s];
        }
      }
      mean.push_back(sum / static_cast<double>(layer.size()));
    }
    composite.push_back(mean);
  }
  return global_budgets(composite, total, most);
}

/// The same tokens for the heads of a layer, `scores` [layers][heads][slots]: the score of a slot
/// is the mean of the heads', [layers][slots]; NaN where one of them is.
inline mat mean_scores(const std::vector<mat>& scores) {
  mat all;
  for (const mat& layer : scores) {
    vec mean(layer.front().size());
    for (std::size_t s = 0; s < mean.size(); ++s) {
      for (const vec& head : layer) mean[s] += head[s];
      mean[s] /= static_cast<double>(layer.size());
    }
    all.push_back(mean);
  }
  return all;
}

/// Of slots with these scores, in ascending order: the first `sinks`, the last `recent`, then the
/// highest until there are `target`; ties to the lower slot, NaN last.
inline std::vector<std::size_t> kept_slots(const vec& score, int sinks, int recent, int target) {
  std::vector<std::size_t> kept, others;
  for (std::size_t s = 0; s < score.size(); ++s) {
    const int at = static_cast<int>(s), n = static_cast<int>(score.size());
    (at < sinks || at >= n - recent ? kept : others).push_back(s);
  }
  for (const std::size_t s : top(score, others, static_cast<std::size_t>(target) - kept.size()))
    kept.push_back(s);
  std::sort(kept.begin(), kept.end());
  return kept;
}

}  // namespace oracle
