// SPDX-License-Identifier: MIT
// DropKV (OpenReview MqfNzH3TVH): what the eviction of one slot does to the outputs of the last
// queries. Written as its definition, every output computed again without the slot, not as the
// closed form (p / (1 - p))^2 |v - o|^2 that follows from it.
//
// Readings, of the authors' code for kvpress:
//  - Summed over the last `window` queries and the query heads of a group (the code: their mean).
//  - Averaged over `kernel` neighbours in position; zeros stand beyond the ends.
//  - The last `window` tokens stay. The code has no sinks.
//  - A query that is left without any slot counts infinitely; the code adds 1e-6 to 1 - p.
#pragma once

#include "oracle/policies.hpp"

namespace oracle {

struct dropkv {
  int window = 32;
  int sinks = 4;
  int kernel = 7;

  /// |o without slot `j` - o|^2 of one row's query at position `at`.
  static double change(const head& h, const vec& q, std::size_t row, int at, std::size_t j) {
    std::vector<bool> visible = seen_from(h, at);
    if (!visible[j]) return 0;
    double lse = 0;
    const vec all = probabilities(h, q, row, at, visible, lse);
    visible[j] = false;
    if (std::count(visible.begin(), visible.end(), true) == 0 && h.terms.sinks.empty())
      return std::numeric_limits<double>::infinity();
    const vec without = probabilities(h, q, row, at, visible, lse);
    vec difference(h.values(), 0.0);
    for (std::size_t t = 0; t < all.size(); ++t)
      add(difference, without[t] - all[t], h.slots[t].value);
    return dot(difference, difference);
  }

  vec scores(const head& h, const tensor& queries, const std::vector<int>& positions) const {
    const std::vector<int> at = positions_or_last(h, queries.size(), positions);
    const std::size_t n = h.slots.size(), count = queries.size(),
                      last = std::min(count, static_cast<std::size_t>(window));
    vec s(n, 0.0), pooled(n, 0.0);
    for (std::size_t i = count - last; i < count; ++i)
      for (std::size_t g = 0; g < queries[i].size(); ++g)
        for (std::size_t j = 0; j < n; ++j) s[j] += change(h, queries[i][g], g, at[i], j);
    for (std::size_t j = 0; j < n; ++j)  // slots of a prompt lie in position order
      for (std::size_t t = 0; t < n; ++t)
        if (std::abs(static_cast<int>(t) - static_cast<int>(j)) <= kernel / 2)
          pooled[j] += s[t] / kernel;
    return pooled;
  }

  void prompt(head& h, const tensor& queries, const std::vector<int>& positions, int target) const {
    if (static_cast<int>(h.slots.size()) > target)
      evict(h, protected_slots(h, sinks, window), scores(h, queries, positions), target);
  }
  mat step(head&, const mat&, const vec&, const vec&, int, int) const {
    throw std::logic_error("oracle: dropkv: expected a prompt, got a step");
  }
};

}  // namespace oracle
