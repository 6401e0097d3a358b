// SPDX-License-Identifier: MIT
/// Task `speed`: what compressing costs and what it gains, on one thread.
#pragma once

#include <algorithm>  // std::ranges::sort
#include <chrono>
#include <vector>

#include "evaluate/dataset.hpp"

namespace evaluate {

struct speed {
  double prefill_ms = 0, decode_tokens_per_s = 0, decode_vs_full = 0;
};

template <class F>
double seconds_of(F f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

inline double median(std::vector<double> x) {
  std::ranges::sort(x);
  return x[x.size() / 2];
}

/// The full model's forward pass over the prompt alone.
inline double prefill_seconds(const engine::decoder& model, std::span<const int> tokens) {
  std::vector<double> times;
  for (int round = 0; round < 3 && !interrupted; ++round) {
    times.push_back(seconds_of([&] { engine::prefill(model, tokens); }));
  }
  return times.empty() ? 0 : median(times);
}

/// All layers of the first prompt, measured and compressed; with its second reading, if that is
/// what `p` measures on.
double compress_seconds(const named_policy& p, contender c, const engine::config& shape,
                        const dataset& m);

/// Decoding behind the compressed prompt and behind the whole one, by turns, so that what else the
/// machine does meets both alike: medians over the turns.
speed decode_speed(const contender& c, const contender& full, const engine::decoder& model,
                   const text_prompt& p);

}  // namespace evaluate
