// SPDX-License-Identifier: MIT
#include "evaluate/speed.hpp"

#include "evaluate/compressed_cache.hpp"

namespace evaluate {

double compress_seconds(const named_policy& p, contender c, const engine::config& shape,
                        const dataset& m) {
  c.index = 0;
  std::vector<double> times;
  for (int round = 0; round < 3; ++round) {
    times.push_back(seconds_of([&] {
      compressed_cache(
          c, measure(shape, m.timed, std::span(&p, 1), m.prompts.front().read.body, m.again));
    }));
  }
  return median(times) + (p.queries == query_source::replay ? m.again.of(p).seconds : 0);
}

speed decode_speed(const contender& c, const contender& full, const engine::decoder& model,
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
