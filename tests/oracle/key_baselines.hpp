// SPDX-License-Identifier: MIT
// Baselines that look at keys, or at nothing: random, KeyDiff, Expected Attention, centroids,
// Compactor.
#pragma once

#include "oracle/evictors.hpp"
#include "oracle/lookahead.hpp"

namespace oracle {

/// Sinks, the last `window`, and of the rest those with the highest unit_random(seed, position).
/// pin_prompt (the baseline of decode benchmarks, arXiv 2609.03430, 2606.03928): tokens of prompts
/// rank above all that were decoded. A prompt above the budget is sampled itself.
struct random_tokens {
  int sinks = 4;
  int window = 32;
  std::uint64_t seed = 0;
  bool pin_prompt = false;

  void evict_to(head& h, int target) const {
    vec score;
    for (const slot& s : h.slots)
      score.push_back(unit_random(seed, s.position) + (s.position < h.prompt ? 1 : 0));
    evict(h, protected_slots(h, sinks, window), score, target, exact);
  }
  void observe(head&, const mat&, int) const {}
  void prompt(head& h, const tensor&, const std::vector<int>&, int target) const {
    if (pin_prompt) h.prompt = h.next;
    evict_to(h, target);
  }
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    return plain_step(*this, h, q, k, v, target, trigger);
  }
};

/// KeyDiff (arXiv 2504.15364): the keys least like the mean of all keys brought to length 1.
///
/// score = -cos(k_j, mean_i k_i/|k_i|) over all slots held, keys as stored (rotated). A zero key
/// adds nothing to the mean and has cosine 0. The paper has no sinks and no window.
struct key_diff {
  int sinks = 4;
  int window = 0;

  void evict_to(head& h, int target) const {
    mat units;
    for (const slot& s : h.slots) {
      units.push_back(s.key);
      const double n = std::sqrt(dot(s.key, s.key));
      for (double& e : units.back()) e = n > 0 ? e / n : 0;
    }
    const vec mean = mean_of(units);
    const double length = std::sqrt(dot(mean, mean));
    vec score;
    for (const vec& u : units) score.push_back(length > 0 ? -dot(u, mean) / length : 0);
    evict(h, protected_slots(h, sinks, window), score, target);
  }
  void observe(head&, const mat&, int) const {}
  void prompt(head& h, const tensor&, const std::vector<int>&, int target) const {
    evict_to(h, target);
  }
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    return plain_step(*this, h, q, k, v, target, trigger);
  }
};

/// Expected Attention (arXiv 2510.00636): what queries drawn from a Gaussian would attend to.
///
/// For each query head: mu and Sigma (of the population) of all un-rotated queries so far, those at
/// positions below `sinks` left out unless there are no others; R = the mean rotation over the
/// `future` positions after the newest; mu' = R mu, Sigma' = R Sigma R^T;
///   l_j = scale mu'.k_j + scale^2/2 k_j^T Sigma' k_j + beta_j        (ln E exp(scale q.k))
/// softmax over the slots that are not protected, mean over the heads, times |v_j|. No queries:
/// mu = 0, Sigma = 0. In decode every step's query joins the sums.
struct expected_attention {
  int sinks = 4;
  int window = 0;
  int future = 512;
  rope rotation = {};

  void observe(head& h, const mat& q, int position) const {
    query_memory& m = h.moments;
    const auto d = static_cast<std::size_t>(h.dim), heads = static_cast<std::size_t>(h.group);
    if (position < sinks) return;
    if (m.sum.empty()) {
      m.sum = zeros(heads, d);
      m.squares = tensor(heads, zeros(d, d));
    }
    ++m.count;
    for (std::size_t g = 0; g < heads; ++g) {
      const vec x = rotated(q[g], -position, rotation);
      for (std::size_t i = 0; i < d; ++i) {
        m.sum[g][i] += x[i];
        for (std::size_t j = 0; j < d; ++j) m.squares[g][i][j] += x[i] * x[j];
      }
    }
  }
  /// The mean rotation, as a matrix [dim][dim].
  mat mean_rotation(const head& h) const {
    const auto d = static_cast<std::size_t>(h.dim);
    mat r = zeros(d, d);
    for (int t = 1; t <= future; ++t)
      for (std::size_t c = 0; c < d; ++c) {
        vec unit(d, 0.0);
        unit[c] = 1;
        const vec column = rotated(unit, newest(h) + t, rotation);
        for (std::size_t i = 0; i < d; ++i) r[i][c] += column[i] / future;
      }
    return r;
  }
  vec score(const head& h, const std::vector<bool>& safe) const {
    const query_memory& m = h.moments;
    const mat r = mean_rotation(h);
    const double scale = h.terms.scale;
    vec total(h.slots.size(), 0.0);
    std::vector<bool> others;
    for (bool is : safe) others.push_back(!is);
    for (std::size_t g = 0; g < static_cast<std::size_t>(h.group); ++g) {
      vec mean(r.size(), 0.0);
      mat sigma = zeros(r.size(), r.size());
      for (std::size_t i = 0; i < r.size() && m.count > 0; ++i) {
        mean[i] = m.sum[g][i] / m.count;
        for (std::size_t j = 0; j < r.size(); ++j)
          sigma[i][j] =
              m.squares[g][i][j] / m.count - m.sum[g][i] * m.sum[g][j] / m.count / m.count;
      }
      mean = times(r, mean);
      sigma = times(times(r, sigma), transposed(r));
      vec l;
      for (const slot& s : h.slots)
        l.push_back(scale * dot(mean, s.key) + scale * scale / 2 * dot(s.key, times(sigma, s.key)) +
                    s.log_mass);
      double lse = 0;
      const vec p = softmax(l, others, lse);
      for (std::size_t j = 0; j < p.size(); ++j)
        total[j] += p[j] / h.group * std::sqrt(dot(h.slots[j].value, h.slots[j].value));
    }
    return total;
  }
  void evict_to(head& h, int target) const {
    const std::vector<bool> safe = protected_slots(h, sinks, window);
    evict(h, safe, score(h, safe), target);
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

/// Compactor (arXiv 2507.08143): outliers among un-rotated keys, and non-causal attention within
/// chunks of the prompt.
///
/// Only the slots that are not protected are looked at, in position order, in chunks of `chunk`.
/// Each chunk's own queries (those given at the positions of its slots) attend to all of its slots,
/// and to the sink;
/// a_j = attention received, summed over them and over the heads, times |v_j|, averaged with both
/// neighbours (zeros beyond the ends: always over 3), even across chunks. l_j = leverage among the
/// slots looked at (exact; the paper sketches it). Both to mean 0 and standard deviation 1 (over
/// n - 1; at least 1e-6). score = blend l_j + a_j; blend < 0: the share of slots that leave. No
/// queries, and in decode: l_j alone, of the slots then held.
struct compactor {
  int sinks = 4;
  int window = 4;
  int chunk = 256;
  double blend = -1;
  rope rotation = {};

  static vec standardised(vec x) {
    const auto n = static_cast<double>(x.size());
    double mean = 0, squares = 0;
    for (double e : x) mean += e / n;
    for (double e : x) squares += (e - mean) * (e - mean);
    const double deviation = n > 1 ? std::sqrt(squares / (n - 1)) : 0;
    for (double& e : x) e = (e - mean) / std::max(deviation, 1e-6);
    return x;
  }
  void evict_by(head& h, const tensor& queries, const std::vector<int>& at, int target) const {
    const std::vector<bool> safe = protected_slots(h, sinks, window);
    std::vector<std::size_t> others;
    for (std::size_t j = 0; j < safe.size(); ++j)
      if (!safe[j]) others.push_back(j);
    if (others.empty()) return evict(h, safe, vec(safe.size(), 0.0), target);
    std::sort(others.begin(), others.end(), [&](std::size_t a, std::size_t b) {
      return h.slots[a].position < h.slots[b].position;
    });
    const std::size_t n = others.size();
    mat keys;
    for (std::size_t j : others)
      keys.push_back(rotated(h.slots[j].key, -h.slots[j].position, rotation));
    const vec outlying = standardised(leverage(keys));
    vec received(n, 0.0), pooled(n, 0.0);
    for (std::size_t i = 0; i < n; ++i) {
      std::vector<bool> visible(h.slots.size(), false);
      const auto size = static_cast<std::size_t>(chunk);
      for (std::size_t t = i / size * size; t < n && t / size == i / size; ++t)
        visible[others[t]] = true;
      for (std::size_t q = 0; q < at.size(); ++q)
        for (std::size_t g = 0; g < queries[q].size(); ++g) {
          if (at[q] != h.slots[others[i]].position) continue;
          double lse = 0;
          const vec p = probabilities(h, queries[q][g], g, at[q], visible, lse);
          for (std::size_t t = 0; t < n; ++t) received[t] += p[others[t]];
        }
    }
    for (std::size_t i = 0; i < n; ++i)
      received[i] *= std::sqrt(dot(h.slots[others[i]].value, h.slots[others[i]].value));
    for (std::size_t i = 0; i < n; ++i)
      pooled[i] =
          (received[i] + (i > 0 ? received[i - 1] : 0) + (i + 1 < n ? received[i + 1] : 0)) / 3;
    const vec attended = standardised(pooled);
    const double share = blend >= 0 ? blend : 1 - target / static_cast<double>(h.slots.size());
    vec score(h.slots.size(), 0.0);
    for (std::size_t i = 0; i < n; ++i)
      score[others[i]] = at.empty() ? outlying[i] : share * outlying[i] + attended[i];
    evict(h, safe, score, target);
  }
  void evict_to(head& h, int target) const { evict_by(h, {}, {}, target); }
  void observe(head&, const mat&, int) const {}
  void prompt(head& h, const tensor& queries, const std::vector<int>& positions, int target) const {
    evict_by(h, queries, positions_or_last(h, queries.size(), positions), target);
  }
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const {
    return plain_step(*this, h, q, k, v, target, trigger);
  }
};

}  // namespace oracle
