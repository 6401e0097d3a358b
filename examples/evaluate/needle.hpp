// SPDX-License-Identifier: MIT
/// Task `needle`: is a fact planted in the prompt still there after compression?
#pragma once

#include <algorithm>  // std::fill_n
#include <array>
#include <numeric>  // std::accumulate
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "evaluate/compressed_cache.hpp"
#include "evaluate/dataset.hpp"
#include "evaluate/estimate.hpp"

namespace evaluate {

/// Right answers, by depth of the needle.
struct recall {
  std::array<index_t, depth_bins> right = {}, asked = {};

  recall& operator+=(const recall& more) {
    for (std::size_t bin = 0; bin < depth_bins; ++bin) {
      right[bin] += more.right[bin];
      asked[bin] += more.asked[bin];
    }
    return *this;
  }
  /// The share of cases that were answered right.
  estimate share() const {
    std::vector<double> cases(std::accumulate(asked.begin(), asked.end(), std::size_t{0}), 0.0);
    std::fill_n(cases.begin(), std::accumulate(right.begin(), right.end(), index_t{0}), 1.0);
    return estimate_of(cases);
  }
};

/// The needle cases that a policy was asked so far, after compression and before it.
struct needle_recall {
  recall after, inside;
};

/// The likeliest token but `except`, of a row of logits.
int likeliest(const engine::matrix_view& logits, int except = -1);

/// What the model wrote.
struct reply {
  std::size_t value = 0;  ///< which of those that were wanted; as many as they are: none
  int begins = -1;        ///< its first token that is more than spaces; -1: there was none
};

/// Greedy decoding: a number, or a word, that is one of `wanted`, and no digit or letter more.
/// `never` is a token that it may not begin with.
class writer {
 public:
  writer(const engine::tokenizer& tokens, std::span<const std::string> wanted, int never = -1);

  /// The token to decode next, behind `logits [1, vocab]`; none: the answer has ended, or is wrong.
  std::optional<int> next(const engine::matrix_view& logits);

  reply written() const;

 private:
  const engine::tokenizer& tokens_;
  std::span<const std::string> wanted_;
  std::string_view signs_;
  std::size_t most_ = 0;
  int never_, begins_ = -1;
  std::vector<int> answer_;
  std::string word_;
};

/// What is written behind `logits`.
reply write(compressed_decoder& decoder, const row_major_matrix* logits,
            const engine::tokenizer& tokens, std::span<const std::string> wanted, int never = -1);

/// Cases that are decoded side by side.
inline constexpr index_t cases_abreast = 8;

/// The question after compression, or (`inside`) as the end of the prompt before it.
recall needle(const contender& c, const engine::decoder& model, const engine::tokenizer& tokens,
              const std::vector<needle_case>& cases, bool inside, const workers& on);

}  // namespace evaluate
