// SPDX-License-Identifier: MIT
// How often the slot that a step evicts is among the 1, 2, ... that the scores before it would
// evict first: what a comparison on the way is worth that is made for so many.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvmeld/compress/one_head.hpp"
#include "kvmeld/memory/cache.hpp"
#include "kvmeld/policies/d2o.hpp"
#include "kvmeld/policies/ems.hpp"
#include "kvmeld/policies/hooks.hpp"
#include "kvmeld/policies/keepkv.hpp"
#include "spec.hpp"
#include "topic.hpp"

namespace {

using kvmeld::index_t;

constexpr index_t dim = 128;

/// `f(s)`: what a policy orders the slots of a head by, the lowest first.
auto order(const kvmeld::d2o&, const auto&, const kvmeld::head_state& state) {
  return [&](index_t s) { return state.column(0)[static_cast<std::size_t>(s)]; };
}
auto order(const kvmeld::keepkv&, const auto& head, const kvmeld::head_state& state) {
  return [&](index_t s) { return head.log_mass(s) + state.column(0)[static_cast<std::size_t>(s)]; };
}
auto order(const kvmeld::ems&, const auto& head, const kvmeld::head_state& state) {
  namespace detail = kvmeld::detail;
  const detail::ems_table tokens(state, head.group());
  return detail::entry_weight(tokens, detail::global_local(tokens, head.length()));
}
index_t latest(const kvmeld::d2o& p, index_t target) {
  return kvmeld::share_of(p.recent, target - p.sinks);
}
index_t latest(const kvmeld::keepkv& p, index_t target) {
  return kvmeld::share_of(p.recent, target);
}
index_t latest(const kvmeld::ems& p, index_t) { return p.window; }

/// One head that decodes three times its slots, and then `steps` that are counted.
template <class Policy>
void count(const Policy& policy, bool topic, index_t slots, index_t group, index_t steps) {
  kvmeld::cache kv(bench::spec(1, group, dim), {.capacity = slots + 1});
  const auto head = kv.head(0);
  auto state = kvmeld::make_head_state(policy, head);
  kvmeld::workspace work;
  std::mt19937 generator(6);
  std::normal_distribution<float> normal;
  bench::topic_stream x(dim, group, 0.5F);
  std::vector<float> out(x.q.size());
  constexpr std::array<std::size_t, 6> most{1, 2, 4, 8, 12, 16};
  std::array<index_t, most.size()> among{};
  for (index_t t = 0; t < 3 * slots + steps; ++t) {
    if (topic) {
      x.next();
    } else {
      for (auto* const row : {&x.q, &x.k, &x.v}) {
        std::generate(row->begin(), row->end(), [&] { return normal(generator); });
      }
    }
    const index_t newest = head.next_position();
    const kvmeld::protection stays{policy.sinks, latest(policy, slots), newest};
    std::vector<std::pair<float, index_t>> first;
    if (t >= 3 * slots) {
      const auto score = order(policy, head, state);
      for (index_t s = 0; s < head.length(); ++s) {
        if (!stays(head.position(s))) {
          first.emplace_back(score(s), s);
        }
      }
    }
    std::sort(first.begin(), first.end());
    kvmeld::step(policy, head, state, work, x.q.data(), x.k.data(), x.v.data(), {.slots = slots},
                 out.data());
    if (t < 3 * slots) {
      continue;
    }
    for (std::size_t i = 0; i < std::min(first.size(), most.back()); ++i) {
      if (head.position(first[i].second) == newest) {  // the new token took its place
        for (std::size_t m = 0; m < most.size(); ++m) {
          among[m] += i < most[m] ? 1 : 0;
        }
      }
    }
  }
  std::printf("%-7s %-7s %5d slots, group %d:", std::string(Policy::name()).c_str(),
              topic ? "topic" : "random", slots, group);
  for (std::size_t m = 0; m < most.size(); ++m) {
    std::printf("  %zu %.1f%%", most[m], 100.0 * among[m] / steps);
  }
  std::printf("\n");
}

}  // namespace

int main() {
  for (const index_t slots : {256, 1024, 4096}) {
    for (const index_t group : {1, 4}) {
      for (const bool topic : {false, true}) {
        const index_t steps = slots < 4096 ? 2000 : 500;
        count(kvmeld::d2o{}, topic, slots, group, steps);
        count(kvmeld::keepkv{}, topic, slots, group, steps);
        count(kvmeld::ems{}, topic, slots, group, steps);
      }
    }
  }
}
