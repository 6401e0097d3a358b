// SPDX-License-Identifier: MIT
/// Task `error`: how far attention over the compressed cache is from attention over the full one,
/// head by head, and in what it adds to the residual stream.
#pragma once

#include <cmath>  // std::sqrt
#include <span>

#include "evaluate/compressed_cache.hpp"
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

/// What task `error` gives of a policy.
struct errors {
  estimate attention;  ///< mean over layers, query heads, prompts and the true future queries
  estimate output;     ///< of what all heads together add to the residual stream, over prompts
};

/// The output is that of the future tokens, which see one another too: the root mean square over
/// layers and tokens of ‖W_o (o' − o)‖ / ‖x + W_o o‖, `x` the residual stream before the block. A
/// square, as the divergence of what is predicted is of small errors.
inline errors errors_of(const contender& c, const engine::decoder& model,
                        const std::vector<text_prompt>& prompts, const workers& on) {
  struct means {
    double attention = 0, output = 0;
  };
  const engine::config& shape = model.shape();
  std::vector<double> attention, output;
  for (const means& of_prompt : on.map(static_cast<index_t>(prompts.size()), [&](index_t i) {
         const text_prompt& p = prompts[static_cast<std::size_t>(i)];
         const compressed_cache cache(c, p.read);
         means sum;
         row_major_matrix attended;
         for (index_t l = 0; l < shape.layers; ++l) {
           const auto layer = static_cast<std::size_t>(l);
           const future_attention& full = p.future[layer];
           attend_all(cache.kv(), l, full.tokens.q, attended);
           const auto count = static_cast<std::size_t>(attended.size());
           sum.attention += relative_errors({attended.data(), count},
                                            {full.of_prompt.data(), count}, shape.dim) /
                            static_cast<double>(attended.rows() * shape.heads) / shape.layers;
           attend_behind(cache.kv(), l, full.tokens, attended);
           const auto& projection = model.parameters().layers[layer].o.weight;
           const row_major_matrix off = (attended - full.of_all) * projection.transpose();
           const Eigen::ArrayXf relative = off.rowwise().norm().array() / full.stream.array();
           sum.output += relative.cast<double>().square().mean() / shape.layers;
         }
         return means{sum.attention, std::sqrt(sum.output)};
       })) {
    attention.push_back(of_prompt.attention), output.push_back(of_prompt.output);
  }
  return {estimate_of(attention), estimate_of(output)};
}

/// What the errors of each head weigh behind one prompt, `[layers · KV heads]`: the mean over the
/// future tokens of ‖W_o (o' − o)‖² / ‖x + W_o o‖², summed over its query heads, each by itself.
inline std::vector<double> errors_of_heads(const contender& c, const engine::decoder& model,
                                           const text_prompt& p, const workers& on) {
  const engine::config& shape = model.shape();
  const compressed_cache cache(c, p.read);
  std::vector<double> all;
  for (const auto& of_layer : on.map(shape.layers, [&](index_t i) {
         const auto layer = static_cast<std::size_t>(i);
         const future_attention& full = p.future[layer];
         row_major_matrix attended;
         attend_behind(cache.kv(), i, full.tokens, attended);
         const row_major_matrix off = attended - full.of_all;
         const auto& projection = model.parameters().layers[layer].o.weight;
         std::vector<double> weights(static_cast<std::size_t>(shape.kv_heads));
         for (index_t q = 0; q < shape.heads; ++q) {
           const auto columns = Eigen::seqN(Eigen::Index{q} * shape.dim, shape.dim);
           const row_major_matrix added =
               off(Eigen::all, columns) * projection(Eigen::all, columns).transpose();
           const Eigen::ArrayXf relative = added.rowwise().norm().array() / full.stream.array();
           weights[static_cast<std::size_t>(q / shape.group())] +=
               relative.cast<double>().square().mean();
         }
         return weights;
       })) {
    all.insert(all.end(), of_layer.begin(), of_layer.end());
  }
  return all;
}

}  // namespace evaluate
