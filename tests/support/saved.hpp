// SPDX-License-Identifier: MIT
// A cache as its bits, and as the bytes that it is saved to.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "support/fixtures.hpp"

namespace fixtures {

using words = std::vector<std::uint32_t>;

/// The bits of all that a cache and its state hold: NaN and integers in floats compare too.
words everything(kvmeld::kv_cache auto& kv, const fixtures::state& state) {
  words all;
  const auto add = [&](float x) { all.push_back(std::bit_cast<std::uint32_t>(x)); };
  for (index_t h = 0; h < kv.heads(); ++h) {
    const auto head = kv.head(h);
    for (index_t s = 0; s < head.length(); ++s) {
      for (index_t i = 0; i < head.dim(); ++i) {
        add(static_cast<float>(head.key(s)[i]));
      }
      for (index_t i = 0; i < head.value_dim(); ++i) {
        add(static_cast<float>(head.value(s)[i]));
      }
      add(head.log_mass(s));
      all.push_back(static_cast<std::uint32_t>(head.position(s)));
    }
    all.push_back(static_cast<std::uint32_t>(head.next_position()));
    for (index_t c = 0; c < state[h].slot_stats(); ++c) {
      std::ranges::for_each(state[h].column(c), add);
    }
    std::ranges::for_each(state[h].memory(), add);
    all.push_back(static_cast<std::uint32_t>(state[h].observed()));
  }
  return all;
}

std::string saved(const auto& policy, kvmeld::kv_cache auto& kv, fixtures::state& state) {
  std::ostringstream out;
  fixtures::save(out, policy, kv, state);
  return out.str();
}

/// LAW: in the middle of a stream, a cache that was saved and loaded goes on as the one it was.
template <class Scalar>
void goes_on(const kvmeld::any_policy_or_peer& policy);

/// Two heads under two policies, one of them not measured since its last token: every kind of
/// field.
struct small {
  std::vector<kvmeld::any_policy_or_peer> each = {kvmeld::snapkv{.window = 2, .sinks = 0},
                                                  kvmeld::zsmerge{}};
  std::span<const kvmeld::any_policy_or_peer> policies = each;
  fixtures::cache<Eigen::half> kv{{.heads = 2, .group = 1, .dim = 3, .capacity = 6}};
  fixtures::state state = fixtures::make_state(policies, kv);

  explicit small(index_t tokens) {
    for (index_t h = 0; h < 2; ++h) {
      kv.append(h, normal(3 * tokens), normal(3 * tokens));
      state[h].extend(tokens - h);
      for (index_t c = 0; c < state[h].slot_stats(); ++c) {
        std::ranges::copy(normal(tokens - h), state[h].column(c).begin());
      }
      std::ranges::copy(normal(static_cast<index_t>(state[h].memory().size())),
                        state[h].memory().begin());
      state[h].count_queries(tokens);
    }
  }
  std::string bytes() { return saved(policies, kv, state); }
  /// LAW: the bytes are refused, and all is as it was.
  bool refuses(const std::string& damaged) {
    const words before = everything(kv, state);
    std::istringstream in(damaged);
    try {
      fixtures::load(in, policies, kv, state);
    } catch (const kvmeld::error&) {
      return everything(kv, state) == before;
    }
    return false;
  }
};

}  // namespace fixtures
