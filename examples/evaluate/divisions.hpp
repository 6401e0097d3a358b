// SPDX-License-Identifier: MIT
/// Published divisions of slots between layers and heads, to compare with. Every function's counts
/// sum to exactly the given total.
#pragma once

#include <algorithm>  // std::min, std::ranges::stable_sort
#include <cmath>      // std::cos, std::isfinite
#include <numbers>    // std::numbers::pi
#include <numeric>    // std::iota
#include <span>
#include <vector>

#include "kvmeld/compress/budgets.hpp"
#include "kvmeld/search/select.hpp"

namespace evaluate {

using kvmeld::as_size;
using kvmeld::expects;
using kvmeld::index_t;

/// PyramidKV (arXiv 2406.02069): an arithmetic progression down to the last layer, which gets
/// `1/steepness` of the mean, the first `2 − 1/steepness` of it. Each within [1, length].
inline std::vector<index_t> pyramid_kv(index_t layers, index_t length, index_t total,
                                       double steepness = 20) {
  expects(layers > 0, "pyramid_kv: expected at least 1 layer, got ", layers);
  expects(steepness >= 1 && std::isfinite(steepness),
          "pyramid_kv: expected a finite steepness of at least 1, got ", steepness);
  std::vector<double> weights;
  const double last = 1 / steepness, first = 2 - last;
  for (index_t l = 0; l < layers; ++l) {
    weights.push_back(layers == 1 ? 1 : first + (last - first) * l / (layers - 1));
  }
  return kvmeld::proportional_budgets(weights, total, 1, length);
}

/// PyramidInfer (arXiv 2405.12532): cosine decay from weight 1 at the first layer to `least` at the
/// last. Each within [1, length].
inline std::vector<index_t> pyramid_infer(index_t layers, index_t length, index_t total,
                                          double least = 0.2) {
  expects(layers > 0, "pyramid_infer: expected at least 1 layer, got ", layers);
  expects(least > 0 && least <= 1, "pyramid_infer: expected a least weight in (0, 1], got ", least);
  std::vector<double> weights;
  for (index_t l = 0; l < layers; ++l) {
    const double turn = layers == 1 ? 0 : std::numbers::pi * l / (layers - 1);
    weights.push_back(least + (1 - least) * (1 + std::cos(turn)) / 2);
  }
  return kvmeld::proportional_budgets(weights, total, 1, length);
}

/// AdaKV's budgets of a layer's heads (arXiv 2407.11550): each head's own
/// `floor(floor_alpha · total / heads)` best slots, then the best of all the others until `total`
/// are chosen; ties to the lower head, then to the lower slot, NaN last. `scores [heads, slots]`.
inline std::vector<index_t> ada_budgets(std::span<const float> scores, index_t heads, index_t total,
                                        double floor_alpha = 0.2) {
  expects(heads > 0 && scores.size() % as_size(heads) == 0, "ada_budgets: expected scores [", heads,
          ", slots], got ", scores.size(), " numbers");
  expects(floor_alpha >= 0 && floor_alpha <= 1, "ada_budgets: expected a floor in [0, 1], got ",
          floor_alpha);
  expects(total >= 0 && as_size(total) <= scores.size(), "ada_budgets: expected 0 to ",
          scores.size(), " slots, got ", total);
  const std::size_t slots = scores.size() / as_size(heads),
                    own =
                        std::min(slots, as_size(static_cast<index_t>(floor_alpha * total / heads)));
  const auto best_first = [&](auto&& places) {
    std::ranges::stable_sort(places, [&](std::size_t a, std::size_t b) {
      return kvmeld::rank(scores[a]) > kvmeld::rank(scores[b]);
    });
  };
  std::vector<std::size_t> order(scores.size()), others;
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t first = 0; first < order.size(); first += slots) {
    const auto of_head = std::span(order).subspan(first, slots);
    best_first(of_head);
    others.insert(others.end(), of_head.begin() + static_cast<std::ptrdiff_t>(own), of_head.end());
  }
  std::ranges::sort(others);
  best_first(others);
  std::vector<index_t> budget(as_size(heads), static_cast<index_t>(own));
  for (std::size_t i = 0; i + own * as_size(heads) < as_size(total); ++i) {
    ++budget[others[i] / slots];
  }
  return budget;
}

}  // namespace evaluate
