// SPDX-License-Identifier: MIT
#include "evaluate/chain_text.hpp"

#include <fmt/format.h>

#include <cmath>  // std::exp, std::log, std::pow
#include <numbers>
#include <string>

#include "evaluate/usage.hpp"

namespace evaluate {

std::vector<int> letters_of(const engine::tokenizer& tokens) {
  std::vector<int> letters;
  for (char c = 'a'; c <= 'z'; ++c) {
    const std::string text = {' ', c};
    const auto pieces = tokens.encode_fragment(text);
    // A letter that the tokenizer does not know becomes something else.
    const bool single = pieces.size() == 1 && tokens.encode_fragment(text + text).size() == 2 &&
                        tokens.encode_fragment(text + text)[1] == pieces[0];
    if (single && static_cast<index_t>(letters.size()) < chain_letters) {
      letters.push_back(pieces[0]);
    }
  }
  detail::require(
      static_cast<index_t>(letters.size()) == chain_letters,
      fmt::format("--tasks chain: expected a tokenizer with {} letters that are one piece each "
                  "with the space before them (\" a\"), got {}",
                  chain_letters, letters.size()));
  return letters;
}

namespace detail {

double draw_gamma(random_source& random, double a) {
  const double b = 1 + a / std::numbers::e;
  while (true) {
    const double p = b * random.uniform();
    const double x = p <= 1 ? std::pow(p, 1 / a) : -std::log((b - p) / a);
    if (random.uniform() <= (p <= 1 ? std::exp(-x) : std::pow(x, a - 1))) {
      return x;
    }
  }
}

}  // namespace detail

std::vector<index_t> draw_chain(random_source& random, index_t k, double alpha, index_t n) {
  std::vector<std::vector<double>> rows;  // [from][to], not normalised
  for (index_t from = 0; from < k; ++from) {
    auto& row = rows.emplace_back();
    for (index_t to = 0; to < k; ++to) {
      row.push_back(detail::draw_gamma(random, alpha));
    }
  }
  std::vector<index_t> states = {random.below(k)};
  while (static_cast<index_t>(states.size()) < n) {
    const auto& row = rows[static_cast<std::size_t>(states.back())];
    double sum = 0;
    for (const double x : row) {
      sum += x;
    }
    double left = random.uniform() * sum;
    index_t to = 0;
    while (to + 1 < k && left >= row[static_cast<std::size_t>(to)]) {
      left -= row[static_cast<std::size_t>(to++)];
    }
    states.push_back(to);
  }
  return states;
}

double best_predictor(std::span<const index_t> states, index_t k, double alpha, std::size_t first) {
  const auto size = static_cast<std::size_t>(k);
  std::vector<double> counts(size * size, alpha), sums(size, alpha * k);
  double nats = 0;
  for (std::size_t t = 1; t < states.size(); ++t) {
    const auto from = static_cast<std::size_t>(states[t - 1]);
    double& count = counts[from * size + static_cast<std::size_t>(states[t])];
    nats -= t >= first ? std::log(count / sums[from]) : 0;
    count += 1;
    sums[from] += 1;
  }
  return nats / static_cast<double>(states.size() - first);
}

chain_text draw_chain_text(std::uint64_t seed, index_t prompt, std::span<const int> letters,
                           index_t i) {
  random_source random(seed, 4, i);
  const auto k = static_cast<index_t>(letters.size());
  const auto states = draw_chain(random, k, chain_alpha, prompt + chain_tokens);
  const auto first = static_cast<std::size_t>(prompt);
  chain_text c{.body = {}, .next = {}, .best = best_predictor(states, k, chain_alpha, first)};
  for (std::size_t t = 0; t < states.size(); ++t) {
    (t < first ? c.body : c.next).push_back(letters[static_cast<std::size_t>(states[t])]);
  }
  return c;
}

}  // namespace evaluate
