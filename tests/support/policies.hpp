// SPDX-License-Identifier: MIT
// The list of all policies that laws run over, each with an example that small heads can hold.
#pragma once

#include <algorithm>  // std::ranges::none_of
#include <string>
#include <vector>

#include "kvmeld/peers.hpp"

namespace fixtures {

/// A policy as the laws run it: through any_policy, so that each call is compiled once for all.
struct example {
  std::string name;
  kvmeld::any_policy_or_peer policy;
  kvmeld::index_t sinks = 4;
  bool keeps_bytes = true;  ///< of sinks and the latest; else they take in others, in their place
  bool ranks = true;        ///< slots by its first column
  bool exact = true;        ///< keeps just the budget; else it may keep fewer slots
  kvmeld::index_t latest = 4;  ///< tokens that stay in any case, at least so many
};

/// Every policy, in each of its modes: those of which more is known, then all others of the list.
inline std::vector<example> every_policy() {
  using namespace kvmeld;
  fold by_scores;
  by_scores.pins = fold::pin_rule::scores;
  fold rescored = by_scores;
  rescored.decode.rescore = 5;
  std::vector<example> all = {
      {"full_cache", full_cache{}, 0},
      {"streaming_llm", streaming_llm{}},
      {"h2o", h2o{}},
      {"snapkv", snapkv{.window = 8}},
      {"zsmerge", zsmerge{.proximity = 0.2F, .residual = 3}},
      {"d2o", d2o{}, 4, false},
      {"d2o that counts", d2o{.counts = true, .weights = d2o::weighting::code}, 4, false},
      {"kvmerger", kvmerger{}, 4, true, false},
      {"ems", ems{.window = 8}, 4, false, false},
      {"ems un-rotated", ems{.window = 8, .with_position = false, .merge_unrotated = true}, 4,
       false, false},
      {"keepkv", keepkv{}, 4, false},
      {"keepkv code", keepkv{.variant = keepkv::mode::code, .window = 8}, 4, false, false},
      {"attention_matching", attention_matching{.recent = 4}, 4, false},
      {"attention_matching omp", attention_matching{.omp = true, .recent = 4}, 4, false, false,
       false},
      {"kvzip", kvzip{}, 4, true, true, true, 0},
      {"fold", fold{}, 4, true, false},
      {"fold by scores", by_scores, 4, true, false},
      {"fold that scores in decode", rescored, 4, true, false},
      {"random", random_tokens{.window = 8}},
      {"random prompt", random_tokens{.window = 8, .prompt = true}},
      {"tova", tova{}, 4, true, true, true, 0},
      {"roco", roco{}},
      {"scissorhands", scissorhands{}, 4, true, false},
      {"r_kv", r_kv{}, 4, true, false},
      {"key_diff", key_diff{.window = 4}},
      {"expected_attention", expected_attention{}, 4, true, true, true, 0},
      {"triattention", triattention{}, 4, true, true, true, 0},
      {"centroids", centroids{.window = 8}},
      {"compactor", compactor{}, 4, true, false},
      {"cam", cam{}, 4, false},
      {"dropkv", dropkv{.window = 8}},
      {"massfold", any_massfold{snapkv{.window = 8}}, 4, false},
  };
  for (auto p : any_policy_or_peer::every()) {
    if (std::ranges::none_of(all, [&](const example& e) { return e.policy.name() == p.name(); })) {
      each_option(p, [](const auto& option, auto& owner) {
        auto& member = option.member(owner);
        member = option.name == "window" ? static_cast<std::decay_t<decltype(member)>>(8) : member;
      });
      all.push_back({std::string(p.name()), p, 0, false, false, false, 0});
    }
  }
  return all;
}

}  // namespace fixtures
