#include "evaluate/needle.hpp"

#include <algorithm>  // std::max, std::ranges::find
#include <limits>     // std::numeric_limits
#include <string_view>

namespace evaluate {

int likeliest(const row_major_matrix& logits, int except) {
  Eigen::Index row = 0, token = 0;
  logits.maxCoeff(&row, &token);
  if (token == except) {
    row_major_matrix others = logits;
    others(0, except) = -std::numeric_limits<float>::infinity();
    others.maxCoeff(&row, &token);
  }
  return static_cast<int>(token);
}

reply write(compressed_decoder& decoder, const row_major_matrix* logits,
            const engine::tokenizer& tokens, std::span<const std::string> wanted, int never) {
  const bool number = wanted.front().find_first_not_of("0123456789") == std::string::npos;
  const std::string_view signs =
      number ? "0123456789" : "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  std::size_t most = 0;
  for (const std::string& value : wanted) {
    most = std::max(most, value.size());
  }
  std::vector<int> answer;
  std::string word;
  reply r;
  // A space, the signs, and one token more to see that there are no more signs.
  for (std::size_t length = 0; length < most + 2; ++length) {
    answer.push_back(likeliest(*logits, r.begins < 0 ? never : -1));
    std::string text = tokens.decode(answer);
    text.erase(0, text.find_first_not_of(' '));
    if (r.begins < 0 && !text.empty()) {
      r.begins = answer.back();
    }
    word = text.substr(0, text.find_first_not_of(signs));
    const auto goes_on = [&](const std::string& value) { return value.starts_with(word); };
    if (word.size() < text.size() || std::ranges::none_of(wanted, goes_on)) {
      break;  // it has ended, or is wrong
    }
    logits = &decoder.next(answer.back());
  }
  r.value = static_cast<std::size_t>(std::ranges::find(wanted, word) - wanted.begin());
  return r;
}

bool answers(const contender& c, const engine::decoder& model, const engine::tokenizer& tokens,
             const prompt& p, std::span<const int> question, const std::string& value) {
  compressed_decoder decoder(model, c, p);
  const row_major_matrix* logits = &p.logits;
  for (const int token : question) {
    logits = &decoder.next(token);
  }
  return write(decoder, logits, tokens, std::span(&value, 1)).value == 0;
}

recall needle(const contender& c, const engine::decoder& model, const engine::tokenizer& tokens,
              const std::vector<needle_case>& cases, bool inside, const workers& on) {
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
