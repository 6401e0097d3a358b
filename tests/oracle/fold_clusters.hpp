// fold's clusters: slots as points, seeds far from each other, and Lloyd's rounds.
//
// Readings that the library follows:
//  - Seeds: only slots that are neither pinned nor seeds can become one, ties to the lower slot.
//    With nothing pinned all distances are 1 at first, so that the first seed is the heaviest.
//  - The term of the values in D^2 is |v_i - v_j|^2 / (mean |v|)^2, left out if all values are 0.
//  - The last of the Lloyd rounds only assigns, so `rounds` assignments and rounds - 1 new means.
#pragma once

#include "oracle/foresight.hpp"

namespace oracle::fold_clusters {

/// Points in a space whose squared distance is D^2. [slots][2 dim]
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
  mat x;
  for (const slot& s : h.slots) {
    vec p = times(l, s.key);
    for (double& e : p) e *= h.scale;
    for (double e : s.value) p.push_back(norms > 0 ? e / norms : 0);
    x.push_back(p);
  }
  return x;
}

/// Farthest first: repeatedly the slot of largest w D^2(nearest pinned slot or seed).
inline std::vector<std::size_t> seeds(const mat& x, const vec& w, const std::vector<bool>& pin,
                                      int count) {
  std::vector<bool> taken = pin;
  vec nearest(x.size(), std::numeric_limits<double>::infinity());
  bool any = false;
  const auto take = [&](std::size_t s) {
    taken[s] = any = true;
    for (std::size_t j = 0; j < x.size(); ++j)
      nearest[j] = std::min(nearest[j], squared_distance(x[j], x[s]));
  };
  for (std::size_t j = 0; j < x.size(); ++j)
    if (pin[j]) take(j);
  std::vector<std::size_t> chosen;
  for (int r = 0; r < count; ++r) {
    std::size_t best = x.size();
    double most = -1;
    for (std::size_t j = 0; j < x.size(); ++j) {
      const double gain = any ? w[j] * nearest[j] : w[j];
      if (!taken[j] && gain > most) {
        most = gain;
        best = j;
      }
    }
    chosen.push_back(best);
    take(best);
  }
  return chosen;
}

/// The cluster of each slot, by Lloyd's rounds; -1 for pinned slots.
inline std::vector<int> assigned(const mat& x, const vec& w, const std::vector<bool>& pin,
                                 const std::vector<std::size_t>& seed, int rounds) {
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
        centre[c][i] = sum[c][i] / total[c];
  }
  for (std::size_t c = 0; c < seed.size(); ++c) near[seed[c]] = static_cast<int>(c);
  return near;
}

}  // namespace oracle::fold_clusters
