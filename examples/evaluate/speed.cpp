// SPDX-License-Identifier: MIT
#include "evaluate/speed.hpp"

namespace evaluate {

double compress_seconds(const named_policy& p, const contender& c, const engine::config& shape,
                        const dataset& m, const prompt& read) {
  const engine::record& r = m.timed;
  std::vector<double> times;
  for (int round = 0; round < 3; ++round) {
    double sum = 0;
    for (std::size_t l = 0; l < r.layers.size(); ++l) {
      auto kv = read.layer(l);
      kvmeld::workspace work;
      work.reserve(kv.head(0));
      sum += seconds_of([&] {
        measured_layer measured = measure_layer(p, shape, kv, r, m.again, l);
        const auto queries =
            measured.chosen ? measured.chosen->view() : queries_of(shape, r.layers[l]);
        const auto limits = allocate_budgets(c, read.tokens, read.measured[c.index], l);
        for (index_t h = 0; h < kv.heads(); ++h) {
          const auto i = static_cast<std::size_t>(h);
          kvmeld::compress(c.of_head(l, h, kv.heads()), kv.head(h), measured.heads[i], work,
                           limits[i], queries.of(h));
        }
      });
    }
    times.push_back(sum);
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
