// SPDX-License-Identifier: MIT
/// A random Markov chain over letters, and the best that any predictor can do on it.
#pragma once

#include <cstddef>  // std::size_t
#include <cstdint>
#include <span>
#include <vector>

#include "engine/tokenizer.hpp"
#include "evaluate/random.hpp"

namespace evaluate {

inline constexpr index_t chain_letters = 8;
inline constexpr double chain_alpha = 0.3;    ///< of the transitions' Dirichlet prior
inline constexpr index_t chain_tokens = 128;  ///< decoded behind the prompt

/// The tokens of the first `chain_letters` letters of the alphabet that are single pieces with the
/// space before them.
std::vector<int> letters_of(const engine::tokenizer& tokens);

namespace detail {

/// Gamma of shape 0 < `a` <= 1 and scale 1, by rejection (Ahrens and Dieter 1974, algorithm GS).
double draw_gamma(random_source& random, double a);

}  // namespace detail

/// `n` states 0 .. `k` − 1 of a chain whose transitions from each state are drawn from
/// Dirichlet(α).
std::vector<index_t> draw_chain(random_source& random, index_t k, double alpha, index_t n);

/// Mean nats a state of `states[first ..]` (`first` >= 1) by the posterior predictive under the
/// true prior, which has seen all that came before: no predictor does better on average.
///   p(j | i) = (n_ij + α) / (n_i + k α)
double best_predictor(std::span<const index_t> states, index_t k, double alpha, std::size_t first);

/// One chain, as tokens.
struct chain_text {
  std::vector<int> body;  ///< as long as the prompt
  std::vector<int> next;  ///< [chain_tokens]
  double best = 0;        ///< nats a token of `next`, by the best predictor
};

chain_text draw_chain_text(std::uint64_t seed, index_t prompt, std::span<const int> letters,
                           index_t i);

}  // namespace evaluate
