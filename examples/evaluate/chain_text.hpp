// SPDX-License-Identifier: MIT
/// A random Markov chain over letters, and the best that any predictor can do on it.
#pragma once

#include <fmt/format.h>

#include <cmath>    // std::exp, std::log, std::pow
#include <cstddef>  // std::size_t
#include <cstdint>
#include <numbers>
#include <span>
#include <string>
#include <vector>

#include "engine/tokenizer.hpp"
#include "evaluate/policies.hpp"
#include "evaluate/random.hpp"

namespace evaluate {

inline constexpr index_t chain_letters = 8;
inline constexpr double chain_alpha = 0.3;    ///< of the transitions' Dirichlet prior
inline constexpr index_t chain_tokens = 128;  ///< decoded after the prompt

/// The tokens of the first `chain_letters` letters of the alphabet that are single pieces with the
/// space before them.
inline std::vector<int> letters_of(const engine::tokenizer& tokens) {
  std::vector<int> letters;
  for (char c = 'a'; c <= 'z'; ++c) {
    const std::string text = {' ', c};
    const auto pieces = tokens.encode_fragment(text);
    // A letter that the tokenizer does not know becomes something else.
    const bool single = pieces.size() == 1 && tokens.encode_fragment(text + text).size() == 2 &&
                        tokens.encode_fragment(text + text)[1] == pieces[0];
    if (single && count_of(letters) < chain_letters) {
      letters.push_back(pieces[0]);
    }
  }
  detail::require(
      count_of(letters) == chain_letters,
      fmt::format("--tasks chain: expected a tokenizer with {} letters that are one piece each "
                  "with the space before them (\" a\"), got {}",
                  chain_letters, letters.size()));
  return letters;
}

namespace detail {

/// Gamma of shape 0 < `a` <= 1 and scale 1, by rejection (Ahrens and Dieter 1974, algorithm GS).
inline double draw_gamma(random_source& random, double a) {
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

/// `n` states 0 .. `k` − 1 of a chain whose transitions from each state are drawn from
/// Dirichlet(α).
inline std::vector<index_t> draw_chain(random_source& random, index_t k, double alpha, index_t n) {
  std::vector<std::vector<double>> rows;  // [from][to], not normalised
  for (index_t from = 0; from < k; ++from) {
    auto& row = rows.emplace_back();
    for (index_t to = 0; to < k; ++to) {
      row.push_back(detail::draw_gamma(random, alpha));
    }
  }
  std::vector<index_t> states = {random.below(k)};
  while (count_of(states) < n) {
    const auto& row = rows[as_size(states.back())];
    double sum = 0;
    for (const double x : row) {
      sum += x;
    }
    double left = random.uniform() * sum;
    index_t to = 0;
    while (to + 1 < k && left >= row[as_size(to)]) {
      left -= row[as_size(to++)];
    }
    states.push_back(to);
  }
  return states;
}

/// Mean nats a state of `states[first ..]` (`first` >= 1) by the posterior predictive under the
/// true prior, which has seen all that came before: no predictor does better on average.
///   p(j | i) = (n_ij + α) / (n_i + k α)
inline double best_predictor(std::span<const index_t> states, index_t k, double alpha,
                             std::size_t first) {
  const auto size = as_size(k);
  std::vector<double> counts(size * size, alpha), sums(size, alpha * k);
  double nats = 0;
  for (std::size_t t = 1; t < states.size(); ++t) {
    const auto from = as_size(states[t - 1]);
    double& count = counts[from * size + as_size(states[t])];
    nats -= t >= first ? std::log(count / sums[from]) : 0;
    count += 1;
    sums[from] += 1;
  }
  return nats / static_cast<double>(states.size() - first);
}

/// One chain, as tokens.
struct chain_text {
  std::vector<int> body = {};  ///< as long as the prompt
  std::vector<int> next = {};  ///< [chain_tokens]
  double best = 0;             ///< nats a token of `next`, by the best predictor
};

inline chain_text draw_chain_text(std::uint64_t seed, index_t prompt, std::span<const int> letters,
                                  index_t i) {
  random_source random(seed, 4, i);
  const auto k = count_of(letters);
  const auto states = draw_chain(random, k, chain_alpha, prompt + chain_tokens);
  const auto first = as_size(prompt);
  chain_text c{.best = best_predictor(states, k, chain_alpha, first)};
  for (std::size_t t = 0; t < states.size(); ++t) {
    (t < first ? c.body : c.next).push_back(letters[as_size(states[t])]);
  }
  return c;
}

}  // namespace evaluate
