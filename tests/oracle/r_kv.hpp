// SPDX-License-Identifier: MIT
// R-KV: attention received, and what other keys say as well.
#pragma once

#include "oracle/evictors.hpp"

namespace oracle {

/// R-KV (arXiv 2505.24133): what the latest queries attend to, less what other keys say as well.
///
/// The last `window` tokens stay. Importance I_j of every other slot: the largest logit of the
/// group's heads, softmax over these slots as far as the query sees them, the mean over the last
/// `window` queries, then the largest of `kernel` neighbours in position among these slots.
/// Redundancy R_j: c_ij the cosine of two keys held, 0 of a key with itself, and 0 of key i with
/// the latest key that it has a cosine above `similar` with; the mean of c_ij over all i, softmax
/// over all slots j. score = lambda I - (1 - lambda) R. A zero key has cosine 0. The paper has no
/// sinks.
struct r_kv {
  int sinks = 4;
  int window = 8;
  int kernel = 7;
  double lambda = 0.07;
  double similar = 0.5;

  vec importance(const head& h) const {
    std::vector<std::size_t> outside;
    for (std::size_t j = 0; j < h.slots.size(); ++j)
      if (h.slots[j].position <= newest(h) - window) outside.push_back(j);
    std::sort(outside.begin(), outside.end(), [&](std::size_t a, std::size_t b) {
      return h.slots[a].position < h.slots[b].position;
    });
    vec mean(h.slots.size(), 0.0), pooled = mean;
    for (const auto& [at, q] : h.memory.queries) {
      vec largest(h.slots.size(), -std::numeric_limits<double>::infinity());
      for (std::size_t g = 0; g < q.size(); ++g) {
        const vec l = logits_of(h, q[g], g, at);
        for (std::size_t j = 0; j < l.size(); ++j) largest[j] = std::max(largest[j], l[j]);
      }
      std::vector<bool> visible(h.slots.size(), false);
      for (std::size_t j : outside) visible[j] = h.terms.sees(at, h.slots[j].position);
      double lse = 0;
      const vec p = softmax(largest, visible, lse);
      for (std::size_t j = 0; j < p.size(); ++j)
        mean[j] += p[j] / static_cast<double>(h.memory.queries.size());
    }
    const int n = static_cast<int>(outside.size());
    for (int i = 0; i < n; ++i)
      for (int t = std::max(0, i - kernel / 2); t <= std::min(n - 1, i + kernel / 2); ++t) {
        double& most = pooled[outside[static_cast<std::size_t>(i)]];
        most = std::max(most, mean[outside[static_cast<std::size_t>(t)]]);
      }
    return pooled;
  }
  vec redundancy(const head& h) const {
    const std::size_t n = h.slots.size();
    vec mean(n, 0.0);
    for (std::size_t i = 0; i < n; ++i) {
      vec c(n, 0.0);
      std::size_t latest = i;  // itself: nothing to clear
      for (std::size_t j = 0; j < n; ++j) {
        if (j == i) continue;
        const vec &a = h.slots[i].key, &b = h.slots[j].key;
        const double norms = std::sqrt(dot(a, a) * dot(b, b));
        c[j] = norms > 0 ? dot(a, b) / norms : 0;
        decided(c[j], similar, 0.01);  // in floats it is off by 1e-7
        if (c[j] > similar && (latest == i || h.slots[j].position > h.slots[latest].position))
          latest = j;
      }
      c[latest] = 0;
      for (std::size_t j = 0; j < n; ++j) mean[j] += c[j] / static_cast<double>(n);
    }
    double lse = 0;
    return softmax(mean, std::vector<bool>(n, true), lse);
  }
  void evict_to(head& h, int target) const {
    const vec i = importance(h), r = redundancy(h);
    vec score;
    for (std::size_t j = 0; j < i.size(); ++j) score.push_back(lambda * i[j] - (1 - lambda) * r[j]);
    evict(h, protected_slots(h, sinks, window), score, target);
  }
  void observe(head& h, const mat& q, int position) const {
    auto& held = h.memory.queries;
    held.emplace_back(position, q);
    if (static_cast<int>(held.size()) > window) held.erase(held.begin());
  }
  void prompt(head& h, const tensor& queries, const std::vector<int>& positions, int target) const {
    const std::vector<int> at = positions_or_last(h, queries.size(), positions);
    for (std::size_t i = 0; i < queries.size(); ++i) observe(h, queries[i], at[i]);
    evict_to(h, target);
  }
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    return plain_step(*this, h, q, k, v, target, trigger);
  }
};

}  // namespace oracle
