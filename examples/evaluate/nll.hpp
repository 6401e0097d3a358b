// SPDX-License-Identifier: MIT
/// Task `nll`: how well the model predicts text behind a compressed prompt, and how far its
/// predictions are from the full cache's. Tasks `chain` and `copy`: text that only the whole prompt
/// tells.
#pragma once

#include <algorithm>  // std::clamp, std::max, std::min, std::ranges::transform
#include <cmath>      // std::log
#include <span>
#include <vector>

#include "evaluate/compressed_cache.hpp"
#include "evaluate/dataset.hpp"
#include "evaluate/estimate.hpp"
#include "evaluate/parallel.hpp"
#include "evaluate/plan.hpp"
#include "evaluate/task.hpp"

namespace evaluate {

/// The logarithm of a row of logits' sum of exponentials.
inline double log_sum_exp(const engine::matrix_view& logits) {
  const float most = logits.maxCoeff();
  const row_major_matrix all = (logits.array() - most).exp();  // in floats, which vectorizes
  return std::log(all.cast<double>().sum()) + double{most};
}

/// Nats that `token` costs.
inline double surprise(const engine::matrix_view& logits, int token) {
  return log_sum_exp(logits) - double{logits(0, token)};
}

/// KL(p ‖ q) = Σ p (ln p − ln q) of two rows of logits, nats.
inline double kl_divergence(const engine::matrix_view& p, const engine::matrix_view& q) {
  const double of_p = log_sum_exp(p), of_q = log_sum_exp(q);
  const row_major_matrix shares = (p.array() - static_cast<float>(of_p)).exp();
  const auto apart = (p - q).array().cast<double>() + (of_q - of_p);
  return std::max(0.0, (shares.array().cast<double>() * apart).sum());
}

/// What a compressed cache predicts of the tokens after a prompt, in mean nats a token.
struct prediction {
  double nll = 0;  ///< of the true tokens
  double kl = 0;   ///< from the full cache's distribution to the compressed one's
};

/// A contender that goes on after a prompt.
struct continuation {
  const contender& chosen;
  const prompt& read;
  std::span<const int> next;     ///< the true tokens
  const row_major_matrix& full;  ///< the full cache's logits, `[next.size() − 1, vocab]`, or none
};

/// Each token of `next` is fed to predict the one behind it; the prompt itself predicts the first.
/// All of them side by side, so that weights are read once: as many tokens are to come for each.
/// `done`: as of `workers::map_in_steps`.
inline std::vector<prediction> predict_abreast(const engine::decoder& model,
                                               std::span<const continuation> all,
                                               const auto& done) {
  std::vector<compressed_decoder> decoders;
  std::vector<compressed_decoder*> each;
  std::vector<prediction> sums;
  decoders.reserve(all.size());  // they stay where they are
  for (const continuation& c : all) {
    each.push_back(&decoders.emplace_back(model, c.chosen, c.read));
    sums.push_back({.nll = surprise(c.read.logits, c.next.front())});
  }
  engine::decoder::scratch work;
  row_major_matrix logits;
  std::vector<int> tokens(all.size());
  const std::size_t count = all.front().next.size();
  for (std::size_t t = 1; t < count && !interrupted; ++t) {
    std::ranges::transform(all, tokens.begin(),
                           [&](const continuation& c) { return c.next[t - 1]; });
    compressed_decoder::next(each, tokens, work, logits);
    done(1.0 / static_cast<double>(count - 1));
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto own = logits.row(static_cast<Eigen::Index>(i));
      sums[i].nll += surprise(own, all[i].next[t]);
      sums[i].kl += all[i].full.size() > 0
                        ? kl_divergence(all[i].full.row(static_cast<Eigen::Index>(t) - 1), own)
                        : 0;
    }
  }
  for (prediction& sum : sums) {
    sum.nll /= static_cast<double>(count), sum.kl /= static_cast<double>(count);
  }
  return sums;
}

/// So many at most go side by side.
inline constexpr index_t continuations_abreast = 64;

/// Of `all` continuations of `p` as many as give every thread some, and as keep below `--memory` on
/// each, were nothing evicted.
inline index_t abreast(const options& o, const prompt& p, index_t all) {
  const double most = o.memory * (1 << 30) / static_cast<double>(p.body->kv.bytes());
  return std::clamp(static_cast<index_t>(std::min<double>(most, continuations_abreast)), 1,
                    std::max(1, (all + o.threads - 1) / o.threads));
}

/// A prediction's means over prompts.
struct mean_prediction {
  estimate nll, kl;
};

/// Those of the 256 true tokens behind each prompt, for each entry; of those refused nothing.
inline std::vector<mean_prediction> predict(std::span<const entry> entries, const options& o,
                                            const engine::decoder& model,
                                            const std::vector<text_prompt>& prompts,
                                            const workers& on) {
  std::vector<continuation> all;
  for (const entry& e : entries) {
    for (const text_prompt& p : prompts) {
      if (e.refusal.empty()) {
        all.push_back({e.chosen, p.read, p.next, p.predicted});
      }
    }
  }
  const std::size_t each = as_size(abreast(o, prompts.front().read, count_of(all)));
  const auto batches = on.map_in_steps(
      static_cast<index_t>((all.size() + each - 1) / each), [&](index_t i, const auto& done) {
        const std::size_t first = as_size(i) * each;
        return predict_abreast(
            model, std::span(all).subspan(first, std::min(each, all.size() - first)), done);
      });
  std::vector<mean_prediction> means(entries.size());
  std::size_t next = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    std::vector<double> nll, kl;
    for (std::size_t p = 0; entries[i].refusal.empty() && p < prompts.size(); ++p, ++next) {
      const prediction& x = batches[next / each][next % each];
      nll.push_back(x.nll), kl.push_back(x.kl);
    }
    if (!nll.empty()) {
      means[i] = {estimate_of(nll), estimate_of(kl)};
    }
  }
  return means;
}

/// For each contender, mean nats a token of `next` after the prompt `text`.
inline std::vector<score> nats_behind(const engine::decoder& model, std::span<const int> text,
                                      std::span<const int> next,
                                      std::span<const named_policy> policies,
                                      std::span<const contender> contenders, index_t capacity) {
  const prompt read = read_whole(model, policies, text, capacity);
  const row_major_matrix none;
  std::vector<score> scores;
  for (const contender& c : contenders) {
    const continuation alone{c, read, next, none};
    scores.push_back({predict_abreast(model, std::span(&alone, 1), [](double) {}).front().nll});
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
