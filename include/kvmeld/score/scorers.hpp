// SPDX-License-Identifier: MIT
/// Scorers: how one query's attention `[length]` enters a slot's score.
#pragma once

#include <algorithm>  // std::copy
#include <span>
#include <vector>

#include "kvmeld/detail/order.hpp"
#include "kvmeld/memory/view.hpp"
#include "kvmeld/score/observation.hpp"

namespace kvmeld {
inline namespace v0 {
namespace score {

/// `s_j ← λ s_j + a_j`; λ = 1: cumulative attention.
inline void accumulate(std::span<float> score, std::span<const float> attention, float decay = 1) {
  for (std::size_t j = 0; j < attention.size(); ++j) {
    score[j] = accumulated(score[j], attention[j], decay);
  }
}

/// Of scores over the last `window` to 2 `window` queries, kept as a past and a current column: one
/// query more is in `current`, which becomes the past when it holds `window` of them.
inline void count_in_window(float& queries, index_t window, std::span<float> current,
                            std::span<float> past) {
  if (++queries >= static_cast<float>(window)) {
    std::copy(current.begin(), current.end(), past.begin());
    std::fill(current.begin(), current.end(), queries = 0);
  }
}

/// Means over `kernel` neighbours in `order`, in place. At the borders over those that are there,
/// or, with `count_border`, as if zeros stood outside.
inline void average_pool(std::span<const index_t> order, index_t kernel, bool count_border,
                         std::span<float> score) {
  const std::vector<float> raw(score.begin(), score.end());
  const auto n = static_cast<index_t>(order.size());
  const auto at = [&](index_t i) {
    return static_cast<std::size_t>(order[static_cast<std::size_t>(i)]);
  };
  for (index_t i = 0; i < n; ++i) {
    const index_t begin = std::max(index_t{0}, i - kernel / 2);
    const index_t end = std::min(n, i + kernel / 2 + 1);
    float sum = 0;
    for (index_t j = begin; j < end; ++j) {
      sum += raw[at(j)];
    }
    score[at(i)] = sum / static_cast<float>(count_border ? kernel : end - begin);
  }
}

/// The same over neighbours in position, among the slots for which `takes_part(s)`.
template <class TakesPart>
void average_pool(const kv_head auto& head, TakesPart takes_part, index_t kernel, bool count_border,
                  std::span<float> score) {
  std::vector<index_t> order;
  for (index_t s = 0; s < head.length(); ++s) {
    if (takes_part(s)) {
      order.push_back(s);
    }
  }
  std::vector<detail::keyed_slot> keyed;
  detail::sort_by_position(head, order, keyed);
  average_pool(order, kernel, count_border, score);
}

}  // namespace score
}  // namespace v0
}  // namespace kvmeld
