// SPDX-License-Identifier: MIT
// Comparing heads: after a step the order of slots does not matter.
#pragma once

#include "oracle/attention.hpp"

namespace oracle {

/// The same slots in position order.
inline head by_position(const head& h) {
  head r = h;
  std::stable_sort(r.slots.begin(), r.slots.end(),
                   [](const slot& a, const slot& b) { return a.position < b.position; });
  return r;
}

inline std::vector<int> positions(const head& h) {
  std::vector<int> p;
  for (const slot& s : by_position(h).slots) p.push_back(s.position);
  return p;
}

/// |a - b| / max(1, |a|, |b|): absolute near 0, relative for large numbers; infinite for NaN.
inline double difference(double a, double b) {
  if (a == b) return 0;
  const double d = std::abs(a - b) / std::max({1.0, std::abs(a), std::abs(b)});
  return std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
}

inline double difference(const vec& a, const vec& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, difference(a[i], b[i]));
  return worst;
}

inline double difference(const mat& a, const mat& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, difference(a[i], b[i]));
  return worst;
}

/// Key, value and log-mass.
inline double difference(const slot& a, const slot& b) {
  return std::max(
      {difference(a.key, b.key), difference(a.value, b.value), difference(a.log_mass, b.log_mass)});
}

/// Pairs every slot of `a` with one of `b` by key, value and log-mass, closest first come;
/// [slots] indices into b.
inline std::vector<std::size_t> paired(const head& a, const head& b) {
  std::vector<std::size_t> partner;
  std::vector<bool> taken(b.slots.size(), false);
  for (const slot& s : a.slots) {
    std::size_t best = b.slots.size();
    for (std::size_t j = 0; j < b.slots.size(); ++j)
      if (!taken[j] &&
          (best == b.slots.size() || difference(s, b.slots[j]) < difference(s, b.slots[best])))
        best = j;
    if (best < b.slots.size()) taken[best] = true;
    partner.push_back(best);
  }
  return partner;
}

/// The worst difference of keys, values and log-masses between two heads seen as sets of slots.
inline double set_difference(const head& a, const head& b) {
  if (a.slots.size() != b.slots.size()) return std::numeric_limits<double>::infinity();
  const std::vector<std::size_t> partner = paired(a, b);
  double worst = 0;
  for (std::size_t j = 0; j < partner.size(); ++j)
    worst = std::max(worst, difference(a.slots[j], b.slots[partner[j]]));
  return worst;
}

}  // namespace oracle
