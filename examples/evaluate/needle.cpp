// SPDX-License-Identifier: MIT
#include "evaluate/needle.hpp"

#include <algorithm>  // std::max, std::ranges::find
#include <limits>     // std::numeric_limits

namespace evaluate {

int likeliest(const engine::matrix_view& logits, int except) {
  Eigen::Index row = 0, token = 0;
  logits.maxCoeff(&row, &token);
  if (token == except) {
    row_major_matrix others = logits;
    others(0, except) = -std::numeric_limits<float>::infinity();
    others.maxCoeff(&row, &token);
  }
  return static_cast<int>(token);
}

writer::writer(const engine::tokenizer& tokens, std::span<const std::string> wanted, int never)
    : tokens_(tokens), wanted_(wanted), never_(never) {
  const bool number = wanted.front().find_first_not_of("0123456789") == std::string::npos;
  signs_ = number ? "0123456789" : "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  for (const std::string& value : wanted) {
    most_ = std::max(most_, value.size());
  }
}

std::optional<int> writer::next(const engine::matrix_view& logits) {
  // A space, the signs, and one token more to see that there are no more signs.
  if (answer_.size() == most_ + 2) {
    return {};
  }
  answer_.push_back(likeliest(logits, begins_ < 0 ? never_ : -1));
  std::string text = tokens_.decode(answer_);
  text.erase(0, text.find_first_not_of(' '));
  if (begins_ < 0 && !text.empty()) {
    begins_ = answer_.back();
  }
  word_ = text.substr(0, text.find_first_not_of(signs_));
  const auto goes_on = [&](const std::string& value) { return value.starts_with(word_); };
  if (word_.size() < text.size() || std::ranges::none_of(wanted_, goes_on)) {
    return {};
  }
  return answer_.back();
}

reply writer::written() const {
  return {as_size(std::ranges::find(wanted_, word_) - wanted_.begin()), begins_};
}

reply write(compressed_decoder& decoder, const row_major_matrix* logits,
            const engine::tokenizer& tokens, std::span<const std::string> wanted, int never) {
  writer by(tokens, wanted, never);
  while (const auto token = by.next(*logits)) {
    logits = &decoder.next(*token);
  }
  return by.written();
}

namespace {

/// Does the model write the values of these cases? Their questions and answers are decoded side by
/// side.
std::vector<char> answers(const contender& c, const engine::decoder& model,
                          const engine::tokenizer& tokens, std::span<const needle_case> cases,
                          bool inside) {
  struct line {
    compressed_decoder decoder;
    std::span<const int> question;  // still to come
    writer answer;
    std::optional<int> token = {};  // to decode next
  };
  std::vector<line> lines;
  for (const needle_case& n : cases) {
    lines.push_back({compressed_decoder(model, c, inside ? n.with : n.without),
                     inside ? std::span<const int>() : std::span<const int>(n.question),
                     writer(tokens, std::span(&n.value, 1))});
  }
  const auto choose = [](line& l, const engine::matrix_view& logits) {
    if (l.question.empty()) {
      l.token = l.answer.next(logits);
    } else {
      l.token = l.question.front();
      l.question = l.question.subspan(1);
    }
  };
  for (std::size_t i = 0; i < lines.size(); ++i) {
    choose(lines[i], (inside ? cases[i].with : cases[i].without).logits);
  }
  engine::decoder::scratch work;
  row_major_matrix logits;
  while (!interrupted) {
    std::vector<line*> open;
    std::vector<compressed_decoder*> decoders;
    std::vector<int> next;
    for (line& l : lines) {
      if (l.token) {
        open.push_back(&l);
        decoders.push_back(&l.decoder);
        next.push_back(*l.token);
      }
    }
    if (open.empty()) {
      break;
    }
    compressed_decoder::next(decoders, next, work, logits);
    for (std::size_t i = 0; i < open.size(); ++i) {
      choose(*open[i], logits.row(static_cast<Eigen::Index>(i)));
    }
  }
  std::vector<char> right;
  for (const line& l : lines) {
    right.push_back(l.answer.written().value == 0 ? 1 : 0);
  }
  return right;
}

}  // namespace

recall needle(const contender& c, const engine::decoder& model, const engine::tokenizer& tokens,
              const std::vector<needle_case>& cases, bool inside, const workers& on) {
  const auto count = count_of(cases);
  const auto right = on.map((count + cases_abreast - 1) / cases_abreast, [&](index_t i) {
    const index_t first = i * cases_abreast;
    return answers(
        c, model, tokens,
        std::span(cases).subspan(as_size(first), as_size(std::min(cases_abreast, count - first))),
        inside);
  });
  recall r;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const auto bin = as_size(cases[i].bin);
    r.right[bin] += right[i / cases_abreast][i % cases_abreast];
    ++r.asked[bin];
  }
  return r;
}

}  // namespace evaluate
