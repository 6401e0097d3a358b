// SPDX-License-Identifier: MIT
// What the merging policies share: which slots are kept, and the nearest key by cosine.
#pragma once

#include "oracle/policies.hpp"

namespace oracle {

/// cos(a, b); 0 when either is zero.
inline double cosine(const vec& a, const vec& b) {
  const double norms = std::sqrt(dot(a, a)) * std::sqrt(dot(b, b));
  return norms > 0 ? dot(a, b) / norms : 0;
}

struct nearest_key {
  std::size_t slot;
  double cosine;
};

/// The slot of `among` whose key is most similar to `key`; ties to the lower slot. What it is if it
/// is less than `similarity` near, is not asked for.
inline nearest_key nearest(const std::vector<slot>& slots, const std::vector<std::size_t>& among,
                           const vec& key, double similarity = -1) {
  nearest_key best{among.at(0), cosine(key, slots[among[0]].key)};
  double second = -2;
  for (const std::size_t j : among) {
    const double u = cosine(key, slots[j].key);
    if (j != best.slot) second = std::max(second, std::min(u, best.cosine));
    if (u > best.cosine || (u == best.cosine && j < best.slot)) best = {j, u};
  }
  if (similarity > -1) decided(best.cosine, similarity, 1);
  if (best.cosine >= similarity) decided(best.cosine, second, 1);
  return best;
}

/// Indices where `mask` is `wanted`, ascending.
inline std::vector<std::size_t> where(const std::vector<bool>& mask, bool wanted) {
  std::vector<std::size_t> at;
  for (std::size_t j = 0; j < mask.size(); ++j)
    if (mask[j] == wanted) at.push_back(j);
  return at;
}

inline vec scores_of(const head& h) {
  vec score;
  for (const slot& s : h.slots) score.push_back(s.score);
  return score;
}

/// Cumulative attention, as H2O: the column sums of a prompt are added.
inline void add_column_sums(head& h, const tensor& queries, const std::vector<int>& positions,
                            combine group) {
  const vec total = column_scores(h, queries, positions, {.group = group}).total;
  for (std::size_t j = 0; j < total.size(); ++j) h.slots[j].score += total[j];
}

/// Cumulative attention, as H2O: a token is appended, its query's attention is added to every slot
/// (the new one too); the output [group][dim].
inline mat append_and_observe(head& h, const mat& q, const vec& k, const vec& v, combine group) {
  append(h, k, v);
  const attention r = attend(h, q);
  const vec a = combined(r.probabilities, group);
  for (std::size_t j = 0; j < a.size(); ++j) h.slots[j].score += a[j];
  return r.output;
}

}  // namespace oracle
