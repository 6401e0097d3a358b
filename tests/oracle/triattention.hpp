// SPDX-License-Identifier: MIT
// TriAttention: what queries of a known mean will attend to, by distance.
#pragma once

#include <complex>

#include "oracle/evictors.hpp"
#include "oracle/linear.hpp"
#include "oracle/rope.hpp"

namespace oracle {

/// TriAttention (arXiv 2604.04921).
///
/// Of every query head: E q, the mean of un-rotated queries, and E|q_f| of each rotated pair f,
/// which is a complex number. They are measured on all queries so far, or `calibrated` [group]. For
/// a query Delta = 1, 2, 4 ... 65,536 positions after the newest, d the distance to key j:
///   s = sum_f |E q_f| |k_f| cos(omega_f d + phi_f) + sum_f (E|q_f| - |E q_f|) |k_f|
/// with phi_f the angle of E q_f over the un-rotated k_f; elements that do not rotate add their
/// product with E q. The mean over Delta, then per query head to mean 0 and standard deviation 1
/// (of the population, at least 1e-6) over the slots that are not protected, then the largest of
/// the group's heads. The paper pins the prompt; here sinks and the last `window` tokens stay.
struct triattention {
  struct of_head {
    vec mean;       // [dim] un-rotated
    vec magnitude;  // [pairs]
  };

  int sinks = 4;
  int window = 0;
  rope rotation = {};
  std::vector<of_head> calibrated = {};

  std::complex<double> pair(const vec& x, std::size_t f) const {
    const std::size_t pairs = x.size() / 2;
    return rotation.interleaved ? std::complex(x[2 * f], x[2 * f + 1])
                                : std::complex(x[f], x[f + pairs]);
  }
  /// The sums of a head's queries are in its `moments`, those of magnitudes as its squares'
  /// diagonal.
  void observe(head& h, const mat& q, int position) const {
    query_memory& m = h.moments;
    const auto d = static_cast<std::size_t>(h.dim), heads = static_cast<std::size_t>(h.group);
    if (m.sum.empty()) {
      m.sum = zeros(heads, d);
      m.squares = tensor(heads, zeros(1, d / 2));
    }
    ++m.count;
    for (std::size_t g = 0; g < heads; ++g) {
      const vec x = rotated(q[g], -position, rotation);
      for (std::size_t i = 0; i < d; ++i) m.sum[g][i] += x[i];
      for (std::size_t f = 0; f < d / 2; ++f) m.squares[g][0][f] += std::abs(pair(x, f));
    }
  }
  of_head measured(const head& h, std::size_t g) const {
    if (!calibrated.empty()) return calibrated[g];
    const auto d = static_cast<std::size_t>(h.dim);
    of_head of{vec(d, 0.0), vec(d / 2, 0.0)};
    if (h.moments.count == 0) return of;
    for (std::size_t i = 0; i < d; ++i) of.mean[i] = h.moments.sum[g][i] / h.moments.count;
    for (std::size_t f = 0; f < d / 2; ++f)
      of.magnitude[f] = h.moments.squares[g][0][f] / h.moments.count;
    return of;
  }
  /// s of one slot before it is normalised.
  double raw(const head& h, const of_head& of, const slot& s) const {
    const auto d = static_cast<std::size_t>(h.dim);
    const vec key = rotated(s.key, -s.position, rotation);
    double sum = 0;
    for (std::size_t f = 0; f < d / 2; ++f) {
      const auto q = pair(of.mean, f), k = pair(key, f);
      const double phi = std::arg(q) - std::arg(k);
      double cosine = 0;
      for (int i = 0; i <= 16; ++i) {
        const double distance = newest(h) + std::exp2(i) - s.position;
        cosine += std::cos(frequency(rotation, static_cast<int>(f), h.dim) * distance + phi) / 17;
      }
      sum += std::abs(q) * std::abs(k) * cosine + (of.magnitude[f] - std::abs(q)) * std::abs(k);
    }
    if (d % 2 != 0) sum += of.mean[d - 1] * key[d - 1];
    return sum;
  }
  vec score(const head& h, const std::vector<bool>& safe) const {
    vec largest(h.slots.size(), -std::numeric_limits<double>::infinity());
    for (std::size_t g = 0; g < static_cast<std::size_t>(h.group); ++g) {
      vec s;
      double n = 0, mean = 0, squares = 0;
      for (const slot& x : h.slots) s.push_back(raw(h, measured(h, g), x));
      for (std::size_t j = 0; j < s.size(); ++j) n += safe[j] ? 0 : 1;
      for (std::size_t j = 0; j < s.size(); ++j) mean += safe[j] ? 0 : s[j] / n;
      for (std::size_t j = 0; j < s.size(); ++j)
        squares += safe[j] ? 0 : (s[j] - mean) * (s[j] - mean) / n;
      for (std::size_t j = 0; j < s.size(); ++j)
        largest[j] = std::max(largest[j], (s[j] - mean) / std::max(std::sqrt(squares), 1e-6));
    }
    return largest;
  }
  void evict_to(head& h, int target) const {
    const std::vector<bool> safe = protected_slots(h, sinks, window);
    evict(h, safe, score(h, safe), target, 1);
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
