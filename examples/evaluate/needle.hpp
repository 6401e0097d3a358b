/// Task `needle`: is a fact planted in the prompt still there after compression?
#pragma once

#include <array>
#include <string>

#include "evaluate/material.hpp"

namespace evaluate {

/// Right answers, by depth of the needle.
struct recall {
  std::array<index_t, depth_bins> right = {}, asked = {};

  double share() const {
    return static_cast<double>(std::accumulate(right.begin(), right.end(), index_t{0})) /
           std::accumulate(asked.begin(), asked.end(), index_t{0});
  }
};

inline int likeliest(const row_major_matrix& logits) {
  Eigen::Index row = 0, token = 0;
  logits.maxCoeff(&row, &token);
  return static_cast<int>(token);
}

/// Greedy decoding behind `question`: does the text begin with the value, and no digit more?
inline bool answers(const contender& c, const engine::decoder& model,
                    const engine::tokenizer& tokens, const prompt& p, std::span<const int> question,
                    const std::string& value) {
  compressed_decoder decoder(model, c, p);
  const row_major_matrix* logits = &p.logits;
  for (const int token : question) {
    logits = &decoder.next(token);
  }
  std::vector<int> answer;
  std::string text;
  // A space, the digits, and one token more to see that there are no more digits.
  for (std::size_t length = 0; length < value.size() + 2; ++length) {
    answer.push_back(likeliest(*logits));
    text = tokens.decode(answer);
    text.erase(0, text.find_first_not_of(' '));
    const std::size_t digits = std::min(text.size(), text.find_first_not_of("0123456789"));
    if (digits < text.size() || text.substr(0, digits) != value.substr(0, digits)) {
      break;  // the number has ended, or is wrong
    }
    logits = &decoder.next(answer.back());
  }
  return text.substr(0, text.find_first_not_of("0123456789")) == value;
}

/// The question after compression, or (`inside`) as the end of the prompt before it.
inline recall needle(const contender& c, const engine::decoder& model,
                     const engine::tokenizer& tokens, const std::vector<needle_case>& cases,
                     bool inside, const workers& on) {
  const auto right = on.map(static_cast<index_t>(cases.size()), [&](index_t i) {
    const needle_case& n = cases[static_cast<std::size_t>(i)];
    return static_cast<char>(inside ? answers(c, model, tokens, n.with, {}, n.value)
                                    : answers(c, model, tokens, n.without, n.question, n.value));
  });
  recall r;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const auto bin = static_cast<std::size_t>(cases[i].bin);
    r.right[bin] += right[i];
    ++r.asked[bin];
  }
  return r;
}

}  // namespace evaluate
