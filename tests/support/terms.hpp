// SPDX-License-Identifier: MIT
// What layers of models put into a logit, for tests to run over.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "support/typed_cache.hpp"

namespace fixtures {

/// One layer's terms: caches of them have any number of heads.
struct layer_terms {
  std::string name = "plain";
  float spread = 1;               ///< of the logits of normal rows
  float cap = 0;                  ///< 0: none
  std::vector<float> sinks = {};  ///< of the query heads in turn; empty: none
  bool slopes = false;            ///< ALiBi's: 2^(−8 i / n), i = 1 … n query heads
  index_t window = 0;             ///< 0: none

  cache_shape shape(index_t heads, index_t group, index_t dim, index_t capacity,
                    const kvmeld::rotary& rope = default_rope, index_t value_dim = 0) const {
    cache_shape s{.heads = heads,
                  .group = group,
                  .dim = dim,
                  .capacity = capacity,
                  .rope = rope,
                  .value_dim = value_dim};
    s.scale = spread / std::sqrt(static_cast<float>(dim));
    s.soft_cap = cap, s.window = window;
    const index_t n = heads * group;
    for (index_t j = 0; j < n && !sinks.empty(); ++j) {
      s.sink_logits.push_back(sinks[static_cast<std::size_t>(j) % sinks.size()]);
    }
    for (index_t j = 0; j < n && slopes; ++j) {
      s.alibi_slopes.push_back(std::exp2(-8 * static_cast<float>(j + 1) / static_cast<float>(n)));
    }
    return s;
  }
};

/// Of every kind, with logits on both sides of what a cap and a sink are.
inline const std::vector<layer_terms> all_terms = {
    {},
    {.name = "cap 30, logits beyond", .spread = 30, .cap = 30},
    {.name = "cap 50", .spread = 10, .cap = 50},
    {.name = "cap 1", .spread = 2, .cap = 1},
    {.name = "sinks", .sinks = {1, -2, 4, 0, 2.5F}},
    {.name = "large sinks", .sinks = {40, 9, 1e4F}},
    {.name = "small sinks", .sinks = {-40, 0.5F, -1e4F}},
    {.name = "slopes", .slopes = true},
    {.name = "window", .sinks = {1, -2, 4}, .window = 20},
    {.name = "all", .spread = 20, .cap = 30, .sinks = {12, -3, 25, 18, 5}, .slopes = true}};

/// Those that merging policies carry out.
inline const std::vector<layer_terms> merged_terms = {
    {},
    {.name = "cap 1", .spread = 2, .cap = 1},
    {.name = "sinks", .sinks = {1, -2, 4, 0, 2.5F}},
    {.name = "cap and sinks", .spread = 2, .cap = 1.5F, .sinks = {3, 0, -1, 2, 4}}};

/// Those that policies carry out which only evict.
inline const std::vector<layer_terms> evicted_terms = [] {
  std::vector<layer_terms> all = merged_terms;
  all.push_back({.name = "slopes", .slopes = true});
  all.push_back({.name = "all", .spread = 2, .cap = 1.5F, .sinks = {3, 0, 2, 1}, .slopes = true});
  return all;
}();

}  // namespace fixtures
