// SPDX-License-Identifier: MIT
// The log-sum-exp of an engine's prefill: what it does to scores, and what of it is refused.
#include <catch2/catch.hpp>
#include <cmath>   // std::exp, std::log, std::nanf, std::sqrt
#include <limits>  // std::numeric_limits
#include <vector>

#include "kvmeld/compressor.hpp"
#include "kvmeld/policies/h2o.hpp"
#include "support/model.hpp"

namespace log_sum_exp_test {

using namespace small_model;
using kvmeld::budget;

/// `[kv_heads, group, tokens]` ln Σ exp(ℓ) of the queries from token `first` on over all slots that
/// they see, by loops, times `factor` and plus `shift`.
std::vector<float> log_sums(model_cache& kv, index_t layer, const prompt_rows& prompt,
                            index_t first, double factor, double shift) {
  const auto q = prompt.queries(layer, 0, prompt.tokens);
  std::vector<float> all;
  for (index_t h = 0; h < kv_heads_of; ++h) {
    const auto head = kv.head(model_cache::of(layer, 0).first + h);
    for (index_t g = 0; g < group; ++g) {
      for (index_t t = first; t < prompt.tokens; ++t) {
        const std::ptrdiff_t row = (std::ptrdiff_t{t} * kv_heads_of + h) * group + g;
        double sum = 0;
        for (index_t s = 0; s <= t; ++s) {
          double product = 0;
          for (index_t i = 0; i < dim; ++i) {
            product += double{q[static_cast<std::size_t>(row * dim + i)]} * head.key(s)[i];
          }
          sum += std::exp(product / std::sqrt(double{dim}));
        }
        all.push_back(static_cast<float>(std::log(sum) * factor + shift));
      }
    }
  }
  return all;
}

TEST_CASE("compressor: a prompt is scored by the prefill's log-sum-exp, but behind a seal") {
  const index_t tokens = 30, sealed = GENERATE(0, 8), behind = tokens - sealed;
  const prompt_rows prompt(tokens);
  const auto scores = [&](bool given, double factor, double shift) {
    model_cache kv(64);
    kvmeld::compressor meld(kv, kvmeld::h2o{}, budget{.slots = 50});
    for (index_t l = 0; l < layers_of; ++l) {
      prompt.append(kv, l, 0, 0, sealed);
    }
    meld.seal(0, sealed);
    for (index_t l = 0; l < layers_of; ++l) {
      prompt.append(kv, l, 0, sealed, tokens);
      const auto sums = log_sums(kv, l, prompt, sealed, factor, shift);
      const kvmeld::queries own(prompt.queries(l, sealed, tokens), behind, layer_spec);
      meld.prompt(model_cache::of(l, 0), given ? own.with_log_sum_exp(sums) : own);
    }
    meld.end_prompt(0);
    const auto column = meld.state(model_cache::of(1, 0).first).column(0);
    return std::vector<float>(column.begin(), column.end());
  };
  const auto measured = scores(false, 1, 0), low = scores(true, 1, 0), high = scores(true, 1, 0.1);
  for (std::size_t s = 0; s < static_cast<std::size_t>(behind); ++s) {
    CHECK(low[s] == Approx(measured[s]));
    CHECK(low[s] == Approx(high[s] * (sealed > 0 ? 1 : std::exp(0.1F))));
  }
  if (sealed == 0) {  // in base 2; of half the slots
    CHECK_THROWS_WITH(scores(true, 1 / std::log(2.0), 0),
                      Catch::Contains("prompt: expected a log-sum-exp near "));
    CHECK_THROWS_WITH(scores(true, 1, -1), Catch::Contains(" (natural logarithm)"));
  }
}

TEST_CASE("queries refuse a log-sum-exp that is NaN or infinity", "[errors]") {
  const prompt_rows prompt(3);
  const kvmeld::queries own(prompt.queries(0, 0, 3), 3, layer_spec);
  std::vector<float> sums(kv_heads_of * group * 3, -std::numeric_limits<float>::infinity());
  CHECK_NOTHROW(own.with_log_sum_exp(sums));  // rows that see no slot
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    sums[7] = bad;
    CHECK_THROWS_WITH(
        own.with_log_sum_exp(sums),
        Catch::Contains("queries: expected log_sum_exp below infinity, got NaN or Inf"));
  }
}

}  // namespace log_sum_exp_test
