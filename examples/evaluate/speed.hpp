// SPDX-License-Identifier: MIT
/// Task `speed`: what compressing costs and what it gains, on one thread.
#pragma once

#include <algorithm>  // std::ranges::sort
#include <chrono>
#include <vector>

#include "evaluate/compressed_cache.hpp"
#include "evaluate/dataset.hpp"

namespace evaluate {

struct speed {
  double decode_tokens_per_s = 0, decode_vs_full = 0;
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

/// The median of three runs.
template <class F>
double median_seconds(F f) {
  std::vector<double> times;
  for (int round = 0; round < 3 && (round == 0 || !interrupted); ++round) {
    times.push_back(seconds_of(f));
  }
  return median(times);
}

/// All layers of the first prompt, measured and compressed; with its second reading, if that is
/// what `p` measures on.
inline double compress_seconds(const named_policy& p, contender c, const engine::config& shape,
                               const dataset& m) {
  c.index = 0;
  return median_seconds([&] {
           compressed_cache(
               c, measure(shape, m.timed, std::span(&p, 1), m.prompts.front().read.body, m.again));
         }) +
         (p.queries == query_source::replay ? m.again.of(p).seconds : 0);
}

/// Decoding behind the compressed prompt and behind the whole one, by turns, so that what else the
/// machine does meets both alike: medians over the turns.
inline speed decode_speed(const contender& c, const contender& full, const engine::decoder& model,
                          const text_prompt& p) {
  constexpr std::size_t turns = 12, tokens_a_turn = 16;
  compressed_decoder one(model, c, p.read), other(model, full, p.read);
  std::vector<double> one_times, other_times;
  for (std::size_t turn = 0; turn < turns; ++turn) {
    const auto tokens = std::span(p.next).subspan(turn * tokens_a_turn, tokens_a_turn);
    const auto decode = [&](compressed_decoder& by) {
      return seconds_of([&] {
        for (const int token : tokens) {
          by.next(token);
        }
      });
    };
    one_times.push_back(decode(one));
    other_times.push_back(decode(other));
  }
  const double time = median(one_times);
  return {.decode_tokens_per_s = tokens_a_turn / time,
          .decode_vs_full = median(other_times) / time};
}

}  // namespace evaluate
