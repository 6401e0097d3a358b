// SPDX-License-Identifier: MIT
/// Task `nll`: how well the model predicts text behind a compressed prompt, and how far its
/// predictions are from the full cache's. Tasks `chain` and `copy`: text that only the whole prompt
/// tells.
#pragma once

#include <algorithm>  // std::max
#include <cmath>      // std::log
#include <span>
#include <vector>

#include "evaluate/compressed_cache.hpp"
#include "evaluate/dataset.hpp"
#include "evaluate/estimate.hpp"
#include "evaluate/task.hpp"

namespace evaluate {

/// The logarithm of a row of logits' sum of exponentials.
inline double log_sum_exp(const engine::matrix_view& logits) {
  const float most = logits.maxCoeff();
  return std::log((logits.array() - most).exp().cast<double>().sum()) + double{most};
}

/// Nats that `token` costs.
inline double surprise(const engine::matrix_view& logits, int token) {
  return log_sum_exp(logits) - double{logits(0, token)};
}

/// KL(p ‖ q) = Σ p (ln p − ln q) of two rows of logits, nats.
inline double kl_divergence(const engine::matrix_view& p, const engine::matrix_view& q) {
  const double of_p = log_sum_exp(p), of_q = log_sum_exp(q);
  const auto shares = (p.array() - static_cast<float>(of_p)).exp().cast<double>();
  const auto apart = (p - q).array().cast<double>() + (of_q - of_p);
  return std::max(0.0, (shares * apart).sum());
}

/// What a compressed cache predicts of the tokens after a prompt, in mean nats a token.
struct prediction {
  double nll = 0;  ///< of the true tokens
  double kl = 0;   ///< from the full cache's distribution to the compressed one's
};

/// Each token of `next` is fed through `step` to predict the one behind it; the prompt itself
/// predicts the first. `full`: the full cache's logits, `[next.size() − 1, vocab]`, or nothing.
inline prediction predict(const contender& c, const engine::decoder& model, const prompt& p,
                          std::span<const int> next, const row_major_matrix& full) {
  compressed_decoder decoder(model, c, p);
  prediction sum{.nll = surprise(p.logits, next.front())};
  for (std::size_t t = 1; t < next.size() && !interrupted; ++t) {
    const row_major_matrix& logits = decoder.next(next[t - 1]);
    sum.nll += surprise(logits, next[t]);
    sum.kl +=
        full.size() > 0 ? kl_divergence(full.row(static_cast<Eigen::Index>(t) - 1), logits) : 0;
  }
  const auto count = static_cast<double>(next.size());
  return {sum.nll / count, sum.kl / count};
}

/// A prediction's means over prompts.
struct mean_prediction {
  estimate nll, kl;
};

/// That of the 256 true tokens behind each prompt.
inline mean_prediction predict(const contender& c, const engine::decoder& model,
                               const std::vector<text_prompt>& prompts, const workers& on) {
  std::vector<double> nll, kl;
  for (const prediction& x : on.map(count_of(prompts), [&](index_t i) {
         const text_prompt& p = prompts[as_size(i)];
         return predict(c, model, p.read, p.next, p.predicted);
       })) {
    nll.push_back(x.nll), kl.push_back(x.kl);
  }
  return {estimate_of(nll), estimate_of(kl)};
}

/// For each contender, mean nats a token of `next` after the prompt `text`.
inline std::vector<score> nats_behind(const engine::decoder& model, std::span<const int> text,
                                      std::span<const int> next,
                                      std::span<const named_policy> policies,
                                      std::span<const contender> contenders, index_t capacity) {
  const prompt read = read_whole(model, policies, text, capacity);
  std::vector<score> scores;
  for (const contender& c : contenders) {
    scores.push_back({predict(c, model, read, next, {}).nll});
  }
  return scores;
}

/// Tokens of the passage, of a prompt of twice as many at least.
inline constexpr index_t copied_tokens = 128;

/// Nats a token of the passage from the middle of `text`, the second time.
inline std::vector<score> copy(const engine::decoder& model, std::span<const int> text,
                               std::span<const named_policy> policies,
                               std::span<const contender> contenders, index_t capacity) {
  const std::size_t length = text.size();
  const std::size_t count = std::min<std::size_t>(copied_tokens, length / 2);
  return nats_behind(model, text, text.subspan((length - count) / 2, count), policies, contenders,
                     capacity);
}

}  // namespace evaluate
