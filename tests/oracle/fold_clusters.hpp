// SPDX-License-Identifier: MIT
// fold's clusters: slots as points, seeds far from each other, and Lloyd's rounds.
//
// Readings that the library follows:
//  - Points and centres are halfs: 11 significant bits, at most 65504.
//  - Seeds: only slots that are neither pinned nor seeds can become one, ties to the lower slot.
//    With nothing pinned the first seed is the heaviest, and the rounds begin then.
//  - Rounds of 32 seeds where there are up to 128 of them, of 64 up to 256, of 96 up to 384, else
//    of 128. A round's pool is the 256 slots of largest w D^2 (to the nearest pinned slot or seed
//    of an earlier round). In it w D^2 is compared with 11 bits, the largest being 2^14 and what is
//    above 60000 equal to that.
//  - A slot goes to the nearest seed, ties to the lower seed.
//  - The term of the values in D^2 is |v_i - v_j|^2 / (mean |v|)^2, left out if all values are 0.
//  - The last of the Lloyd rounds only assigns, so `rounds` assignments and rounds - 1 new means.
#pragma once

#include "oracle/lookahead.hpp"

namespace oracle::fold_clusters {

/// Rounded to a half: 11 significant bits, multiples of 2^-24, at most 65504.
inline double as_half(double x) {
  int exponent = 0;
  std::frexp(x, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - 11, -24));
  return std::clamp(std::nearbyint(x / unit) * unit, -65504.0, 65504.0);
}

/// Points in a space whose squared distance is D^2; the keys are centred. [slots][2 dim]
inline mat points(const head& h, const mat& rows) {
  const auto d = static_cast<std::size_t>(h.dim);
  mat c = zeros(d, d);
  for (std::size_t i = 0; i < d; ++i) c[i][i] = 1;
  if (!rows.empty()) {
    c = scatter(rows, mean_of(rows));
    for (std::size_t i = 0; i < d; ++i)
      for (std::size_t j = 0; j < d; ++j)
        c[i][j] = c[i][j] / static_cast<double>(rows.size()) + (i == j ? 1e-3 : 0);
  }
  const mat l = transposed(cholesky(c));  // |l k|^2 = k^T C k
  double norms = 0;
  for (const slot& s : h.slots)
    norms += std::sqrt(dot(s.value, s.value)) / static_cast<double>(h.slots.size());
  mat keys, x;
  for (const slot& s : h.slots) keys.push_back(s.key);
  const vec mean = mean_of(keys);
  for (const slot& s : h.slots) {
    vec k = s.key;
    for (std::size_t i = 0; i < d; ++i) k[i] = h.terms.scale * (k[i] - mean[i]);
    vec p = times(l, k);
    for (double e : s.value) p.push_back(norms > 0 ? e / norms : 0);
    for (double& e : p) e = as_half(e);
    x.push_back(p);
  }
  return x;
}

/// Farthest first, a pool at a time: repeatedly the slot of largest w D^2(nearest pinned slot or
/// seed). In the order that they are chosen in.
inline std::vector<std::size_t> seeds(const mat& x, const vec& w, const std::vector<bool>& pin,
                                      int count) {
  const std::size_t pool_size = 256, quota = count <= 128   ? 32
                                             : count <= 256 ? 64
                                             : count <= 384 ? 96
                                                            : 128;
  const auto wanted = static_cast<std::size_t>(count);
  std::vector<std::size_t> chosen, before;  // before: pinned slots
  for (std::size_t j = 0; j < x.size(); ++j)
    if (pin[j]) before.push_back(j);
  const auto gain = [&](std::size_t j) {
    double d = std::numeric_limits<double>::infinity();
    for (const auto* some : {&before, &chosen})
      for (std::size_t s : *some) d = std::min(d, squared_distance(x[j], x[s]));
    return w[j] * d;
  };
  const auto is_free = [&](std::size_t j) {
    return !pin[j] && std::find(chosen.begin(), chosen.end(), j) == chosen.end();
  };
  if (before.empty() && wanted > 0)
    chosen.push_back(static_cast<std::size_t>(std::max_element(w.begin(), w.end()) - w.begin()));
  while (chosen.size() < wanted) {
    vec gains(x.size(), -1.0);
    std::vector<std::size_t> pool;
    for (std::size_t j = 0; j < x.size(); ++j)
      if (is_free(j)) gains[j] = gain(j), pool.push_back(j);
    std::stable_sort(pool.begin(), pool.end(),
                     [&](std::size_t a, std::size_t b) { return gains[a] > gains[b]; });
    pool.resize(std::min(pool.size(), pool_size));
    std::sort(pool.begin(), pool.end());
    double largest = 0;
    for (std::size_t j : pool) largest = std::max(largest, gains[j]);
    vec bits;  // of the pool
    for (std::size_t j : pool)
      bits.push_back(as_half(std::min(gains[j] * (largest > 0 ? 16384 / largest : 1), 60000.0)));
    for (std::size_t r = 0; r < quota && chosen.size() < wanted; ++r) {
      const auto best =
          static_cast<std::size_t>(std::max_element(bits.begin(), bits.end()) - bits.begin());
      chosen.push_back(pool[best]);
      for (std::size_t i = 0; i < pool.size(); ++i) {
        const double d = w[pool[i]] * squared_distance(x[pool[i]], x[pool[best]]);
        bits[i] =
            std::min(bits[i], as_half(std::min(d * (largest > 0 ? 16384 / largest : 1), 60000.0)));
      }
      bits[best] = -1;
      for (std::size_t s = 0; s < pool.size(); ++s)  // those of this round
        if (!is_free(pool[s])) bits[s] = -1;
    }
  }
  return chosen;
}

/// The cluster of each slot, by Lloyd's rounds; -1 for pinned slots. Sorts the seeds.
inline std::vector<int> assigned(const mat& x, const vec& w, const std::vector<bool>& pin,
                                 std::vector<std::size_t>& seed, int rounds) {
  std::sort(seed.begin(), seed.end());
  mat centre;
  for (std::size_t s : seed) centre.push_back(x[s]);
  std::vector<int> near(x.size(), -1);
  for (int r = 0; r < rounds; ++r) {
    for (std::size_t j = 0; j < x.size(); ++j) {
      if (pin[j]) continue;
      near[j] = 0;
      for (std::size_t c = 1; c < centre.size(); ++c)
        if (squared_distance(x[j], centre[c]) <
            squared_distance(x[j], centre[static_cast<std::size_t>(near[j])]))
          near[j] = static_cast<int>(c);
    }
    if (r == rounds - 1) break;
    mat sum = zeros(centre.size(), x[0].size());
    vec total(centre.size(), 0.0);
    for (std::size_t j = 0; j < x.size(); ++j) {
      if (pin[j]) continue;
      const auto c = static_cast<std::size_t>(near[j]);
      total[c] += w[j];
      for (std::size_t i = 0; i < x[j].size(); ++i) sum[c][i] += w[j] * x[j][i];
    }
    for (std::size_t c = 0; c < centre.size(); ++c)  // an empty cluster keeps its centre
      for (std::size_t i = 0; i < sum[c].size() && total[c] > 0; ++i)
        centre[c][i] = as_half(sum[c][i] / total[c]);
  }
  for (std::size_t c = 0; c < seed.size(); ++c) near[seed[c]] = static_cast<int>(c);
  return near;
}

}  // namespace oracle::fold_clusters
