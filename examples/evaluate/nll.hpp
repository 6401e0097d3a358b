/// Task `nll`: how well the model predicts text behind a compressed prompt.
#pragma once

#include <cmath>  // std::log

#include "evaluate/dataset.hpp"

namespace evaluate {

/// Nats that `token` costs.
inline double surprise(const row_major_matrix& logits, int token) {
  const double most = logits.maxCoeff();
  double sum = 0;
  for (Eigen::Index i = 0; i < logits.size(); ++i) {
    sum += std::exp(double{logits(0, i)} - most);
  }
  return std::log(sum) + most - double{logits(0, token)};
}

/// Mean nats a token of `next`, each fed through `step` to predict the one behind it; the prompt
/// itself predicts the first.
inline double nll(const contender& c, const engine::decoder& model, const prompt& p,
                  std::span<const int> next) {
  compressed_decoder decoder(model, c, p);
  double sum = surprise(p.logits, next.front());
  for (std::size_t t = 1; t < next.size() && !interrupted; ++t) {
    sum += surprise(decoder.next(next[t - 1]), next[t]);
  }
  return sum / static_cast<double>(next.size());
}

/// That of the 256 true tokens behind each prompt.
inline double nll(const contender& c, const engine::decoder& model,
                  const std::vector<text_prompt>& prompts, const workers& on) {
  return on.mean(static_cast<index_t>(prompts.size()), [&](index_t i) {
    const text_prompt& p = prompts[static_cast<std::size_t>(i)];
    return nll(c, model, p.read, p.next);
  });
}

}  // namespace evaluate
