// SPDX-License-Identifier: MIT
/// What policies keep of a head in addition to its slots: docs/results/cost.md.
#include <catch2/catch.hpp>
#include <map>
#include <string>

#include "kvmeld/peers.hpp"

namespace state_size_test {

using kvmeld::index_t;

/// Bytes beside a head of `slots` × `dim` in float, over its own.
double share_of_cache(const kvmeld::any_policy_or_peer& policy, index_t slots, index_t dim,
                      index_t group) {
  const auto own = sizeof(float) *
                   (kvmeld::declared(policy).slot_stats().size() * static_cast<std::size_t>(slots) +
                    kvmeld::declared(policy).memory(dim, group, slots));
  const auto slot = sizeof(float) * (2 * static_cast<std::size_t>(dim) + 2);
  return static_cast<double>(own) / static_cast<double>(slot * static_cast<std::size_t>(slots));
}

TEST_CASE("a policy's state is a small part of its cache") {
  const std::map<std::string, double> large = {
      {"fold", 0.008}, {"zsmerge", 0.013}, {"ems", 0.09}, {"expected_attention", 0.064}};
  for (const kvmeld::any_policy_or_peer& policy : kvmeld::any_policy_or_peer::every()) {
    const std::string name(policy.name());
    CAPTURE(name);
    const auto bound = large.find(name);
    CHECK(share_of_cache(policy, 1024, 128, 1) <= (bound != large.end() ? bound->second : 0.012));
  }
  CHECK(share_of_cache(kvmeld::fold{}, 1024, 128, 4) <= 0.02);
  // All that SmolLM2's heads hold at 5, 10 and 20 % of 896 tokens, over what snapkv's do.
  const auto held = [](const kvmeld::any_policy_or_peer& policy, index_t slots) {
    return 1 + share_of_cache(policy, slots, 64, 3);
  };
  for (const auto& [slots, most] : {std::pair{45, 1.3}, {90, 1.2}, {179, 1.1}}) {
    CHECK(held(kvmeld::fold{}, slots) / held(kvmeld::snapkv{}, slots) <= most);
  }
}

}  // namespace state_size_test
