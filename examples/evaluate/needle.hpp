/// Task `needle`: is a fact planted in the prompt still there after compression?
#pragma once

#include <array>
#include <numeric>  // std::accumulate
#include <span>
#include <string>
#include <vector>

#include "evaluate/dataset.hpp"

namespace evaluate {

/// Right answers, by depth of the needle.
struct recall {
  std::array<index_t, depth_bins> right = {}, asked = {};

  double share() const {
    return static_cast<double>(std::accumulate(right.begin(), right.end(), index_t{0})) /
           std::accumulate(asked.begin(), asked.end(), index_t{0});
  }
};

/// The likeliest token but `except`.
int likeliest(const row_major_matrix& logits, int except = -1);

/// What the model wrote.
struct reply {
  std::size_t value = 0;  ///< which of those that were wanted; as many as they are: none
  int begins = -1;        ///< its first token that is more than spaces; -1: there was none
};

/// Greedy decoding behind `logits`: a number, or a word, that is one of `wanted`, and no digit or
/// letter more. `never` is a token that it may not begin with.
reply write(compressed_decoder& decoder, const row_major_matrix* logits,
            const engine::tokenizer& tokens, std::span<const std::string> wanted, int never = -1);

/// Does the model write the value behind `question`?
bool answers(const contender& c, const engine::decoder& model, const engine::tokenizer& tokens,
             const prompt& p, std::span<const int> question, const std::string& value);

/// The question after compression, or (`inside`) as the end of the prompt before it.
recall needle(const contender& c, const engine::decoder& model, const engine::tokenizer& tokens,
              const std::vector<needle_case>& cases, bool inside, const workers& on);

}  // namespace evaluate
