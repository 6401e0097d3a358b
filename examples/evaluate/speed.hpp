/// Task `speed`: what compressing costs and what it gains, on one thread.
#pragma once

#include <algorithm>  // std::ranges::sort
#include <chrono>
#include <vector>

#include "evaluate/material.hpp"

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

/// All layers of the prompt `r`, measured on its own queries and compressed.
inline double compress_seconds(const contender& c, const engine::config& shape,
                               const engine::record& r, const prompt& p) {
  std::vector<double> times;
  for (int round = 0; round < 3; ++round) {
    double sum = 0;
    for (std::size_t l = 0; l < r.layers.size(); ++l) {
      auto kv = p.layer(l);
      auto state = kvfold::make_state(c.policy, kv);
      const auto queries = queries_of(shape, r.layers[l]);
      sum += seconds_of([&] { kvfold::compress(c.policy, kv, state, queries, c.limit); });
    }
    times.push_back(sum);
  }
  return median(times);
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
