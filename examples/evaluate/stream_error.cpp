// SPDX-License-Identifier: MIT
#include "evaluate/stream_error.hpp"

namespace evaluate {

std::vector<double> stream_error(const contender& c, const engine::config& shape,
                                 const std::vector<stream_record>& streams, const workers& on) {
  const index_t parts = shape.layers * shape.kv_heads;
  const index_t slots = c.limit.slots, steps = stream_budgets * slots;
  const index_t count = static_cast<index_t>(streams.size()) * parts;
  const auto all = on.map(count, [&](index_t i) {
    const stream_record& s = streams[static_cast<std::size_t>(i / parts)];
    const auto layer = static_cast<std::size_t>(i % parts / shape.kv_heads);
    const index_t head = i % shape.kv_heads;
    const auto& [q, k, v] = s.layers[layer];
    const index_t width = shape.group() * shape.dim;
    const auto of_head = static_cast<std::size_t>(i % parts);
    const index_t most = allocate_slots(c, steps, parts)[of_head];
    kvmeld::cache kv(shape.attention(1),
                     {.capacity = most + 1, .keys = c.storage, .values = c.storage});
    compressor meld(kv, c.of_head(of_head), {.slots = most});
    const auto row = [](const row_major_matrix& m, index_t t, index_t first, index_t size) {
      return std::span(&m(t, first), static_cast<std::size_t>(size));
    };
    std::vector<float> out(static_cast<std::size_t>(width));
    std::vector<double> sums(stream_budgets - 1, 0.0);
    for (index_t t = 0; t < steps && !interrupted; ++t) {
      meld.step(kv.heads(0, 0),
                {row(q, t, head * width, width), row(k, t, head * shape.dim, shape.dim),
                 row(v, t, head * shape.dim, shape.dim)},
                out);
      if (t >= slots) {
        sums[static_cast<std::size_t>(t / slots - 1)] +=
            relative_errors(out, {&s.attended[layer](t, head * width), out.size()}, shape.dim);
      }
    }
    return sums;
  });
  std::vector<double> mean(stream_budgets - 1, 0.0);
  for (const auto& sums : all) {
    for (std::size_t b = 0; b < mean.size(); ++b) {
      mean[b] += sums[b] / slots / shape.group() / count;
    }
  }
  return mean;
}

}  // namespace evaluate
