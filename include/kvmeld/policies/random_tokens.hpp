// SPDX-License-Identifier: MIT
#pragma once

#include <string_view>

#include "kvmeld/detail/random.hpp"
#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/merge/evict.hpp"
#include "kvmeld/merge/plan.hpp"
#include "kvmeld/merge/slot_removal.hpp"
#include "kvmeld/score/key_comparison.hpp"
#include "kvmeld/search/select.hpp"
#include "kvmeld/search/slot_scratch.hpp"

namespace kvmeld {
inline namespace v0 {

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
  index_t min_budget() const { return sinks + window + 1; }
  void validate() const {
    search::expect_count(name(), "sinks", sinks, 0);
    search::expect_count(name(), "tokens in the window", window, 0);
  }

  void plan(const kv_head auto& head, const head_state&, index_t target, slot_scratch& work,
            merge_plan& out) const {
    evict(head, target, protected_slots(head, sinks, window), lot(head), work, out);
  }
  slot_removal choose_victim(const kv_head auto& head, const head_state&, index_t,
                             const key_comparison&) const {
    return {.removed = search::lowest_scored(head.length(), protected_slots(head, sinks, window),
                                             lot(head))};
  }

 private:
  auto lot(const kv_head auto& head) const {
    return [&head, this](index_t s) { return double{detail::unit_random(seed, head.position(s))}; };
  }
};

}  // namespace v0
}  // namespace kvmeld
