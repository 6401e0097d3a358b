// SPDX-License-Identifier: MIT
// A policy beside its oracle: the same prompt, the same decode steps.
#pragma once

#include <catch2/catch.hpp>
#include <functional>
#include <type_traits>

#include "support/clearly.hpp"
#include "support/fixtures.hpp"
#include "support/policies.hpp"
#include "support/terms.hpp"

namespace fixtures {

struct setting {
  index_t tokens, dim, group, target, steps;
  index_t trigger = 0;
  double clear = 1e-4;  ///< margin of decisions in decode; more where merged rows are rounded
  kvmeld::rotary rope = default_rope;
  index_t value_dim = 0;  ///< 0: `dim`
  layer_terms terms = {};

  index_t of_values() const { return value_dim == 0 ? dim : value_dim; }
};

/// Prompts and decode runs of several shapes; some compress now and then. Of the last two, values
/// are shorter than keys, and longer.
inline const setting settings[] = {{100, 8, 1, 40, 60},
                                   {100, 33, 2, 41, 60},
                                   {257, 16, 4, 64, 40},
                                   {30, 4, 3, 48, 80},
                                   {1, 5, 1, 24, 100},
                                   {60, 1, 1, 30, 0},
                                   {100, 8, 2, 40, 60, 50},
                                   {1, 8, 2, 24, 90, 31},
                                   {100, 20, 2, 40, 50, 0, 1e-4, default_rope, 12},
                                   {90, 12, 1, 40, 50, 45, 1e-4, default_rope, 20}};

/// A prompt and a decode run in layers of each of `terms`.
inline std::vector<setting> in_layers(const std::vector<layer_terms>& terms) {
  std::vector<setting> all;
  for (const layer_terms& t : terms) {
    all.push_back({.tokens = 90, .dim = 8, .group = 2, .target = 40, .steps = 40, .terms = t});
    all.push_back({.tokens = 1, .dim = 5, .group = 3, .target = 24, .steps = 60, .terms = t});
  }
  return all;
}

/// An oracle's policy, whichever it is.
struct any_oracle {
  std::function<void(oracle::head&, const oracle::tensor&, index_t target)> prompt;
  std::function<oracle::mat(oracle::head&, const oracle::mat& q, const oracle::vec& k,
                            const oracle::vec& v, index_t target, index_t trigger)>
      step;

  template <class Oracle>
  any_oracle(const Oracle& o)  // NOLINT: an oracle's policy is one
      : prompt([o](auto& head, const auto& queries, index_t target) {
          o.prompt(head, queries, {}, target);
        }),
        step([o](auto& head, const auto&... rest) { return o.step(head, rest...); }) {}
};

/// Called after the prompt and after every step: the library's head beside its oracle's.
template <class Scalar>
using looks = std::function<void(const kvmeld::head_state&, const oracle::head&,
                                 const fixtures::head_view<Scalar>&)>;

/// `kvmeld::compress`, compiled once for each scalar.
template <class Scalar>
void compress(const kvmeld::any_policy_or_peer& policy, fixtures::cache<Scalar>& kv,
              fixtures::state& state, const queries& prompt, index_t target);

/// Runs both sides on the same random prompt and steps; slots, log-masses and outputs must agree.
template <class Scalar = float>
void agree(const kvmeld::any_policy_or_peer& policy, const any_oracle& oracle_policy,
           const setting& s, double tolerance = 1e-5,
           const std::type_identity_t<looks<Scalar>>& also = {});

}  // namespace fixtures
