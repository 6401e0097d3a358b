// SPDX-License-Identifier: MIT
/// Tasks `error` and `stream`: how far attention over the compressed cache is from attention over
/// the full one, head by head, and in what it adds to the residual stream.
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
  for (std::size_t begin = 0; begin < full.size(); begin += as_size(dim)) {
    double difference = 0, whole = 0;
    for (std::size_t i = begin; i < begin + as_size(dim); ++i) {
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
  for (const means& of_prompt : on.map(count_of(prompts), [&](index_t i) {
         const text_prompt& p = prompts[as_size(i)];
         const compressed_cache cache(c, p.read);
         means sum;
         const auto layers = shape.full_layers();
         const auto count_of_layers = static_cast<double>(layers.size());
         for (const index_t l : layers) {
           const auto layer = as_size(l);
           const future_attention& full = p.future[layer];
           const row_major_matrix alone = attended(cache.kv(), l, full.tokens, false);
           const auto count = as_size(alone.size());
           sum.attention +=
               relative_errors({alone.data(), count}, {full.of_prompt.data(), count}, shape.dim) /
               static_cast<double>(alone.rows() * shape.heads) / count_of_layers;
           const auto& projection = model.parameters().layers[layer].o.weight;
           const row_major_matrix off =
               (attended(cache.kv(), l, full.tokens, true) - full.of_all) * projection.transpose();
           const Eigen::ArrayXf relative = off.rowwise().norm().array() / full.stream.array();
           sum.output += relative.cast<double>().square().mean() / count_of_layers;
         }
         return means{sum.attention, std::sqrt(sum.output)};
       })) {
    attention.push_back(of_prompt.attention), output.push_back(of_prompt.output);
  }
  return {estimate_of(attention), estimate_of(output)};
}

/// What the errors of each head weigh behind one prompt, `[full layers · KV heads]`: the mean over
/// the future tokens of ‖W_o (o' − o)‖² / ‖x + W_o o‖², summed over its query heads, each by
/// itself.
inline std::vector<double> errors_of_heads(const contender& c, const engine::decoder& model,
                                           const text_prompt& p, const workers& on) {
  const engine::config& shape = model.shape();
  const compressed_cache cache(c, p.read);
  std::vector<double> all;
  const auto layers = shape.full_layers();
  for (const auto& of_layer : on.map(count_of(layers), [&](index_t i) {
         const auto layer = as_size(layers[as_size(i)]);
         const future_attention& full = p.future[layer];
         const row_major_matrix off =
             attended(cache.kv(), layers[as_size(i)], full.tokens, true) - full.of_all;
         const auto& projection = model.parameters().layers[layer].o.weight;
         std::vector<double> weights(as_size(shape.kv_heads));
         for (index_t q = 0; q < shape.heads; ++q) {
           const auto of_head = Eigen::seqN(Eigen::Index{q} * shape.dim, shape.dim);
           const row_major_matrix added =
               off(Eigen::all, of_head) * projection(Eigen::all, of_head).transpose();
           const Eigen::ArrayXf relative = added.rowwise().norm().array() / full.stream.array();
           weights[as_size(q / shape.group())] += relative.cast<double>().square().mean();
         }
         return weights;
       })) {
    all.insert(all.end(), of_layer.begin(), of_layer.end());
  }
  return all;
}

/// Mean over layers, query heads and streams `[stream_budgets − 1]`, of as many steps as the budget
/// has slots each, without the first ones (before, nothing is evicted). Every layer decodes the
/// full model's own queries, keys and values, so that errors do not add up over layers.
inline std::vector<double> stream_error(const contender& c, const engine::config& shape,
                                        const std::vector<stream_record>& streams,
                                        const workers& on) {
  const auto layers = shape.full_layers();
  const index_t parts = shape.full_heads();
  const index_t slots = c.limit.slots, steps = stream_budgets * slots;
  const index_t count = count_of(streams) * parts;
  const auto all = on.map(count, [&](index_t i) {
    const stream_record& s = streams[as_size(i / parts)];
    const index_t full = layers[as_size(i % parts / shape.kv_heads)];
    const auto layer = as_size(full);
    const index_t head = i % shape.kv_heads;
    const auto& [q, k, v, norm, hidden] = s.layers[layer];
    const index_t width = shape.group() * shape.dim;
    const auto of_head = as_size(i % parts);
    const index_t most = allocate_slots(c, steps, parts)[of_head];
    kvmeld::cache kv(shape.attention(full, 1), {.capacity = most + 1,
                                                .keys = c.storage.keys,
                                                .values = c.storage.values,
                                                .newest = c.storage.newest});
    compressor meld(kv, c.of_head(of_head), {.slots = most});
    const auto row = [](const row_major_matrix& m, index_t t, index_t first, index_t size) {
      return std::span(&m(t, first), as_size(size));
    };
    std::vector<float> out(as_size(width));
    std::vector<double> sums(stream_budgets - 1, 0.0);
    for (index_t t = 0; t < steps && !interrupted; ++t) {
      meld.step(kv.heads(0, 0),
                {row(q, t, head * width, width), row(k, t, head * shape.dim, shape.dim),
                 row(v, t, head * shape.dim, shape.dim)},
                out);
      if (t >= slots) {
        sums[as_size(t / slots - 1)] +=
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
