// SPDX-License-Identifier: MIT
// k-means centroids of keys as the whole cache, log-mass ln n (Multipole Attention's centroids).
//
// Readings that the library follows:
//  - Kept as they are: sinks and the last `window`. The others become target - kept clusters.
//  - A slot counts as n = exp(beta) tokens (1 when untouched): means are weighted by n, a cluster
//    has beta = ln of the sum of its n.
//  - Seeds: the others in position order, numbers floor(c m / C), c = 0 .. C-1. `rounds` rounds:
//    assign by Euclidean distance of stored keys, ties to the lower cluster; new means, an empty
//    cluster keeping its centre; the last round only assigns. A seed stays in its own cluster.
//  - A cluster's slot has its seed's position; its value is the mean of the members' values.
//  - Decode: the tokens that have just left the window, the latest of the others, go: each joins
//    the nearest of the others that stay, by the keys as they were, ties to the lower slot.
#pragma once

#include "oracle/lookahead.hpp"

namespace oracle {

struct centroids {
  int sinks = 4;
  int window = 32;
  int rounds = 10;

  /// Slots that are not protected, in position order.
  std::vector<std::size_t> free_slots(const head& h) const {
    const std::vector<bool> safe = protected_slots(h, sinks, window);
    std::vector<std::size_t> others;
    for (std::size_t j = 0; j < safe.size(); ++j)
      if (!safe[j]) others.push_back(j);
    std::sort(others.begin(), others.end(), [&](std::size_t a, std::size_t b) {
      return h.slots[a].position < h.slots[b].position;
    });
    return others;
  }
  /// Each slot j goes into slot into[j], its own if it is kept.
  static void merge(head& h, const std::vector<std::size_t>& into) {
    const head before = h;
    h.slots.clear();
    for (std::size_t j = 0; j < into.size(); ++j) {
      if (into[j] != j) continue;
      h.slots.push_back(before.slots[j]);
      if (std::count(into.begin(), into.end(), j) == 1) continue;
      slot& made = h.slots.back();
      made.key = vec(made.key.size(), 0.0), made.value = vec(made.value.size(), 0.0);
      double count = 0;
      for (std::size_t i = 0; i < into.size(); ++i)
        if (into[i] == j) count += std::exp(before.slots[i].log_mass);
      for (std::size_t i = 0; i < into.size(); ++i) {
        if (into[i] != j) continue;
        const double w = std::exp(before.slots[i].log_mass) / count;
        add(made.key, w, before.slots[i].key), add(made.value, w, before.slots[i].value);
      }
      made.log_mass = std::log(count);
    }
  }
  int clusters(const head& h, int target, std::size_t others) const {
    const int count = target - static_cast<int>(h.slots.size() - others);
    if (count < 1) throw std::invalid_argument("oracle: expected a slot for a centroid");
    return count;
  }

  void prompt(head& h, const tensor&, const std::vector<int>&, int target) const {
    if (static_cast<int>(h.slots.size()) <= target) return;
    const std::vector<std::size_t> others = free_slots(h);
    const auto count = static_cast<std::size_t>(clusters(h, target, others.size()));
    std::vector<std::size_t> seed, near(others.size(), 0);
    mat centre;
    for (std::size_t c = 0; c < count; ++c) {
      seed.push_back(c * others.size() / count);
      centre.push_back(h.slots[others[seed[c]]].key);
    }
    for (int r = 0; r < rounds; ++r) {
      for (std::size_t i = 0; i < others.size(); ++i) {
        const vec& key = h.slots[others[i]].key;
        near[i] = 0;
        for (std::size_t c = 1; c < count; ++c)
          if (squared_distance(key, centre[c]) < squared_distance(key, centre[near[i]]))
            near[i] = c;
      }
      if (r == rounds - 1) break;
      for (std::size_t c = 0; c < count; ++c) {
        double total = 0;
        vec sum(centre[c].size(), 0.0);
        for (std::size_t i = 0; i < others.size(); ++i) {
          if (near[i] != c) continue;
          const double n = std::exp(h.slots[others[i]].log_mass);
          total += n;
          for (std::size_t e = 0; e < sum.size(); ++e) sum[e] += n * h.slots[others[i]].key[e];
        }
        for (std::size_t e = 0; e < sum.size() && total > 0; ++e) centre[c][e] = sum[e] / total;
      }
    }
    for (std::size_t c = 0; c < count; ++c) near[seed[c]] = c;
    std::vector<std::size_t> into;
    for (std::size_t j = 0; j < h.slots.size(); ++j) into.push_back(j);
    for (std::size_t i = 0; i < others.size(); ++i) into[others[i]] = others[seed[near[i]]];
    merge(h, into);
  }
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    append(h, k, v);
    const mat output = attend(h, q).output;
    if (!triggered(h, target, trigger) || static_cast<int>(h.slots.size()) <= target) return output;
    const std::vector<std::size_t> others = free_slots(h);
    const auto count = static_cast<std::size_t>(clusters(h, target, others.size()));
    std::vector<std::size_t> into,
        staying(others.begin(), others.begin() + static_cast<std::ptrdiff_t>(count));
    std::sort(staying.begin(), staying.end());
    for (std::size_t j = 0; j < h.slots.size(); ++j) into.push_back(j);
    for (std::size_t i = count; i < others.size(); ++i) {
      const vec& key = h.slots[others[i]].key;
      std::size_t best = staying[0];
      for (std::size_t s : staying)
        if (squared_distance(key, h.slots[s].key) < squared_distance(key, h.slots[best].key))
          best = s;
      into[others[i]] = best;
    }
    merge(h, into);
    return output;
  }
};

}  // namespace oracle
