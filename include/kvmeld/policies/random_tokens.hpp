// SPDX-License-Identifier: MIT
#pragma once

#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/policies/policy.hpp"

namespace kvmeld::inline v0 {

/// Random tokens: the floor. A method that does not beat it is not worth its cost.
///   score   none: chance, the same for the same seed and position
///   select  sinks and the last W tokens, then a uniform sample of the rest
///   match   none: the others are evicted
struct random_tokens {
  index_t sinks = 4;
  index_t window = 32;
  std::uint64_t seed = 0;

  static constexpr std::string_view name() { return "random"; }
  static void parameters(auto& p, auto f) {
    f("sinks", p.sinks), f("window", p.window), f("seed", p.seed);
  }
  void validate() const {
    search::expect_count(name(), "sinks", sinks, 0);
    search::expect_count(name(), "tokens in the window", window, 0);
  }

  protection protects(const kv_head auto&, index_t) const {
    return {.sinks = sinks, .recent = window};
  }
  double score(const kv_head auto& head, const head_state&, index_t slot) const {
    return double{detail::unit_random(seed, head.position(slot))};
  }
};

}  // namespace kvmeld::inline v0
