// SPDX-License-Identifier: MIT
// A golden case run through a policy of the oracle, and what must hold of it.
#pragma once

#include <catch2/catch.hpp>
#include <string>

#include "oracle/oracle.hpp"
#include "support/golden.hpp"

namespace oracle {

constexpr double tolerance = 1e-5;  // of what the golden files hold: float, 7 decimals

/// One head of a golden case: its tokens, and the cache with the prompt in it.
struct replay {
  mat q, k, v;  // [tokens][dim]
  head cache;
  tensor prompt_queries;  // [prompt][1][dim]
  int heads, index;

  replay(const golden::record& g, int h) : heads(g.heads()), index(h) {
    k = g.of_head("k", h, heads, g.dim());
    v = g.has("v") ? g.of_head("v", h, heads, g.dim()) : k;
    q = g.has("q") ? g.of_head("q", h, heads, g.dim()) : k;
    cache = oracle::make_head(g.dim());
    for (std::size_t t = 0; t < static_cast<std::size_t>(g.prompt()); ++t) {
      append(cache, k[t], v[t]);
      prompt_queries.push_back({q[t]});
    }
  }
  template <class Policy>
  void prompt(const Policy& policy, int target) {
    policy.prompt(cache, prompt_queries, {}, target);
  }
  template <class Policy>
  vec step(const Policy& policy, int i, int target) {
    const std::size_t t = prompt_queries.size() + static_cast<std::size_t>(i);
    return policy.step(cache, {q[t]}, k[t], v[t], target)[0];
  }

  /// The stored slots as a head; what is not stored is as in an untouched token.
  head stored(const golden::record& g, const std::string& prefix, const std::string& score = "",
              double alpha = 0) const {
    head r = oracle::make_head(cache.dim);
    const mat keys = g.of_head((prefix + "keys").c_str(), index, heads, cache.dim);
    const bool values = g.has((prefix + "values").c_str());
    for (const vec& key : keys) append(r, key, vec(key.size(), 0.0));
    for (std::size_t j = 0; j < keys.size(); ++j) {
      if (values)
        r.slots[j].value = g.of_head((prefix + "values").c_str(), index, heads, cache.dim)[j];
      if (!score.empty()) r.slots[j].score = g.of_head(score.c_str(), index, heads)[j];
      if (g.has((prefix + "count").c_str()))
        r.slots[j].count = g.of_head((prefix + "count").c_str(), index, heads)[j];
      r.slots[j].log_mass = alpha * std::log(r.slots[j].count);
    }
    return r;
  }
};

/// The cache and the stored slots are the same set, with the same counts and, if stored, scores.
inline void same_slots(const head& cache, head expected, bool values, bool scores) {
  head ours = cache;
  if (!values)
    for (auto* h : {&ours, &expected})
      for (auto& s : h->slots) s.value.clear();
  REQUIRE(ours.slots.size() == expected.slots.size());
  CHECK(set_difference(ours, expected) < tolerance);
  const auto partner = paired(ours, expected);
  for (std::size_t j = 0; j < partner.size(); ++j) {
    const auto& other = expected.slots[partner[j]];
    CHECK(ours.slots[j].count == other.count);
    if (scores) CHECK(oracle::difference(ours.slots[j].score, other.score) < tolerance);
  }
}

/// Decodes all steps of a case; `alpha` says what the log-mass of a stored count is.
template <class Policy>
void decode(replay& r, const golden::record& g, const Policy& policy, int target, double alpha) {
  int caches = 0;
  for (int i = 0; i < g.steps(); ++i) {
    INFO("step " << i);
    const golden::record expected = g.step(i);
    const vec output = r.step(policy, i, target);
    CHECK(oracle::difference(output, expected.of_head("output", r.index, r.heads)) < tolerance);
    if (expected.has("keys")) {
      const bool values = expected.has("values");
      same_slots(r.cache, r.stored(expected, "", "score", alpha), values, true);
      ++caches;
    }
  }
  CHECK(caches >= 2);
}

}  // namespace oracle
