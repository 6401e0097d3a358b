/// Task `error`: how far attention over the compressed cache is from attention over the full one.
#pragma once

#include <cmath>  // std::sqrt
#include <span>

#include "evaluate/dataset.hpp"
#include "evaluate/estimate.hpp"

namespace evaluate {

/// ‖o' − o‖ / ‖o‖, summed over the heads of `dim` elements that both rows hold.
inline double relative_errors(std::span<const float> compressed, std::span<const float> full,
                              index_t dim) {
  double sum = 0;
  for (std::size_t begin = 0; begin < full.size(); begin += static_cast<std::size_t>(dim)) {
    double difference = 0, whole = 0;
    for (std::size_t i = begin; i < begin + static_cast<std::size_t>(dim); ++i) {
      const double d = double{compressed[i]} - full[i];
      difference += d * d;
      whole += double{full[i]} * full[i];
    }
    sum += difference == 0 ? 0 : std::sqrt(difference / whole);
  }
  return sum;
}

/// Mean over layers, query heads, prompts and the true future queries.
inline estimate attention_error(const contender& c, const engine::config& shape,
                                const std::vector<text_prompt>& prompts, const workers& on) {
  const auto n = static_cast<index_t>(prompts.size());
  const auto of_layers = on.map(n * shape.layers, [&](index_t i) {
    const text_prompt& p = prompts[static_cast<std::size_t>(i / shape.layers)];
    const auto layer = static_cast<std::size_t>(i % shape.layers);
    compressed_layer l(c, p.read, layer);
    row_major_matrix attended;
    attend_all(l.kv, p.queries[layer], attended);
    const row_major_matrix& full = p.attended[layer];
    const auto count = static_cast<std::size_t>(full.size());
    return relative_errors({attended.data(), count}, {full.data(), count}, shape.dim) /
           static_cast<double>(full.rows() * shape.heads);
  });
  std::vector<double> of_prompts(prompts.size());
  for (std::size_t i = 0; i < of_layers.size(); ++i) {
    of_prompts[i / static_cast<std::size_t>(shape.layers)] += of_layers[i] / shape.layers;
  }
  return estimate_of(of_prompts);
}

}  // namespace evaluate
