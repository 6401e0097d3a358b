// SPDX-License-Identifier: MIT
// fold: pinned slots, clusters of the others (oracle_fold_clusters.hpp), each cluster one slot
// fitted to reference queries.
//
// Readings that the library follows:
//  - N in "floor / N" and in the seeds' weights is the number of slots.
//  - Reference queries see all slots: they stand for queries to come, so there is no causal mask.
//  - A slot is protected by its position (below `sinks`, or among the last `recent`), whether or
//    not it holds one token. Outliers are chosen among the slots that hold one token; the leverage
//    is among all slots, each counted once.
//  - Outliers: floor(share * (target - sinks - recent)) of them, less if there are fewer to choose.
//    After a prompt only slots whose pooled leverage is above `outlying` times the mean of all.
//  - A pinned slot keeps its bytes: key, value and log-mass.
//  - A cluster's slot takes its seed's position; rows are in the order of pins and seeds. A cluster
//    of one token is still `single`, though its value may have been fitted.
//  - The ridge is solved for the clusters alone, around what the pins give; it is relative to the
//    trace of what is solved.
//  - Pins by scores (a slot's largest lookahead-max times leverage): all slots but the protected
//  and
//    `clusters` of them (0: round((1 - score_share) free), at least 1) go to the best that hold one
//    token; where none has a score, pins are the outliers.
//  - `pin_gain`, by scores, in a head whose P pins (the protected among them) are more than M,
//    `mean_slots`: the log-mass of what is pinned by score is at least `log_gain`. Values are
//    fitted with it; clusters' log-mass is fitted without. A pin of two prompts has it once.
//  - No queries: m_i = exp(beta_i) / sum exp(beta) + 1e-6, C = I, the tangent's
//    beta = sum_i w_i (beta_i - ln w_i) with w_i = m_i / sum of the cluster's m, and no ridge.
#pragma once

#include <numeric>

#include "oracle/fold_clusters.hpp"
#include "oracle/lookahead_max.hpp"

namespace oracle {

/// gain * c * ln(P / M), N the tokens so far: c = 1 at M / N = 0.1, from there falling to 0 at 0.3
/// in a straight line, and below it as many times as much as M / N is smaller, twice at most.
inline double log_gain(double gain, double pinned, double mean, double tokens) {
  if (mean <= 0 || pinned <= mean) return 0;
  const double c = 10 * mean < tokens ? std::min(2.0, tokens / (10 * mean))
                                      : std::max(0.0, 1.5 - 5 * mean / tokens);
  return gain * c * std::log(pinned / mean);
}

struct fold {
  int queries = 256;  // reference queries, for a prompt
  ahead where = {};   // positions to come
  int sinks = 4;
  int recent = 16;         // after a prompt
  double outliers = 0.25;  // share of the other slots
  int pool = 1;            // after a prompt: neighbours that leverage is averaged over
  double leverage_ridge = 0.01;
  double outlying = 0;  // after a prompt: an outlier's leverage, times the mean
  double floor = 0.1;   // weight of a slot that nothing attends to, in 1/N
  int rounds = 4;
  double ridge = 0.002;
  bool lookahead = true;  // false: the queries as they are
  rope rotation = {};
  bool by_scores = false;  // pins
  int clusters = 0;
  double score_share = 0.7;
  double pin_gain = 0.4;
  int mean_slots = 0;  // slots of a head of the model; 0: no gain
  // decode
  int period = 8;  // slots folded away at a time
  int window = 4;  // queries kept ...
  int stride = 8;  // ... every so many steps
  int decode_recent = 8;
  int rescore = 0;  // steps after which slots are scored by the queries since, and one before

  /// Every slot's mass on the reference queries.
  struct measure {
    mat queries;        // [rows][dim]
    vec lse;            // [rows] Z, the sink's logit included
    mat probabilities;  // [rows][slots]
    vec mass;           // [slots] m
  };
  static measure measured(const head& h, const mat& rows) {
    measure r{rows, {}, {}, vec(h.slots.size(), 0.0)};
    const std::vector<bool> all(h.slots.size(), true);
    for (std::size_t q = 0; q < rows.size(); ++q) {  // the group's heads in turn
      double lse = 0;
      r.probabilities.push_back(probabilities(h, rows[q], q, terms::nowhere, all, lse));
      r.lse.push_back(lse);
    }
    if (rows.empty()) {
      double lse = 0;
      vec beta;
      for (const slot& s : h.slots) beta.push_back(s.log_mass);
      r.mass = softmax(beta, all, lse);
    }
    for (const vec& p : r.probabilities)
      for (std::size_t j = 0; j < p.size(); ++j)
        r.mass[j] += p[j] / static_cast<double>(rows.size());
    for (double& m : r.mass) m += 1e-6;
    return r;
  }

  /// Leverage, averaged over `pool` neighbours in position, those that are there.
  vec pooled_leverage(const head& h) const {
    const vec lever = leverage(unrotated_keys(h, rotation), leverage_ridge);
    vec mean;
    for (const slot& s : h.slots) {
      double sum = 0, count = 0;
      for (std::size_t j = 0; j < lever.size(); ++j) {
        int between = 0;  // in position order, from s to j
        for (const slot& t : h.slots)
          between += (t.position < s.position) != (t.position < h.slots[j].position);
        if (between > pool / 2) continue;
        sum += lever[j];
        ++count;
      }
      mean.push_back(sum / count);
    }
    return mean;
  }

  /// Protected slots and the `count` outliers among the `single` ones.
  static std::vector<bool> pinned(const head& h, std::vector<bool> pin, const vec& leverages,
                                  int count) {
    std::vector<std::size_t> others;
    for (std::size_t j = 0; j < pin.size(); ++j)
      if (!pin[j] && h.slots[j].single) others.push_back(j);
    for (std::size_t j : top(leverages, others, static_cast<std::size_t>(std::max(count, 0))))
      pin[j] = true;
    return pin;
  }
  static int outlier_count(double share, int target, int sinks, int recent) {
    if (target < sinks + recent)
      throw std::invalid_argument("oracle: expected a budget of at least the protected slots");
    return static_cast<int>(share * (target - sinks - recent));
  }

  /// One slot for `members`: means weighted by mass, beta by the mass on the queries (or, without
  /// queries, the tangent's).
  static slot merged(const head& h, const measure& m, std::size_t anchor,
                     const std::vector<std::size_t>& members) {
    slot s = h.slots[anchor];
    double total = 0;
    for (std::size_t i : members) total += m.mass[i];
    s.key = vec(static_cast<std::size_t>(h.dim), 0.0), s.value = vec(h.values(), 0.0);
    s.log_mass = 0;
    for (std::size_t i : members) {
      const double w = m.mass[i] / total;
      add(s.key, w, h.slots[i].key), add(s.value, w, h.slots[i].value);
      s.log_mass += w * (h.slots[i].log_mass - std::log(w));
    }
    if (!m.queries.empty()) {
      double held = 0, made = 0;
      for (std::size_t q = 0; q < m.queries.size(); ++q) {
        for (std::size_t i : members) held += m.probabilities[q][i];
        made += std::exp(h.terms.alike(m.queries[q], s.key) - m.lse[q]);
      }
      s.log_mass = std::log(std::max(held, 1e-20) / std::max(made, 1e-20));
    }
    s.single = h.slots[anchor].single && members.size() == 1;
    return s;
  }

  /// The values that the outputs of the reference queries call for; pinned slots keep theirs.
  void fit_values(head& made, const std::vector<bool>& pin, const head& before,
                  const measure& m) const {
    mat x, outputs, values;
    const std::vector<bool> all(made.slots.size(), true);
    for (const slot& s : made.slots) values.push_back(s.value);
    for (std::size_t q = 0; q < m.queries.size(); ++q) {
      double lse = 0;
      x.push_back(probabilities(made, m.queries[q], q, terms::nowhere, all, lse));
      vec o(made.values(), 0.0);
      for (std::size_t j = 0; j < before.slots.size(); ++j)
        for (std::size_t i = 0; i < o.size(); ++i)
          o[i] += m.probabilities[q][j] * before.slots[j].value[i];
      outputs.push_back(o);
    }
    mat free_values;
    for (std::size_t q = 0; q < x.size(); ++q) {
      vec free_x;
      for (std::size_t r = 0; r < pin.size(); ++r) {
        if (!pin[r]) free_x.push_back(x[q][r]);
        for (std::size_t i = 0; pin[r] && i < outputs[q].size(); ++i)
          outputs[q][i] -= x[q][r] * values[r][i];
      }
      x[q] = free_x;
    }
    for (std::size_t r = 0; r < pin.size(); ++r)
      if (!pin[r]) free_values.push_back(values[r]);
    const mat fitted = ridge_around(x, outputs, free_values, ridge);
    for (std::size_t r = 0, next = 0; r < pin.size(); ++r)
      if (!pin[r]) made.slots[r].value = fitted[next++];
  }

  /// Scores of the slots by a prompt's (or a chunk's) own queries [n][group][dim].
  void score(head& h, const tensor& own) const {
    const vec s = lookahead_max{.rotation = rotation, .leverage_ridge = leverage_ridge}(
        h, own, {}, newest(h) + 1);
    for (std::size_t j = 0; j < s.size(); ++j) h.slots[j].score = std::max(h.slots[j].score, s[j]);
  }

  /// Parts 2 to 4, on reference queries [rows][dim] that are where they are to be measured.
  void compress(head& h, const mat& rows, int target) const {
    const std::size_t n = h.slots.size();
    const int most = outlier_count(outliers, target, sinks, recent);
    if (static_cast<int>(n) <= target) return;
    const measure m = measured(h, rows);
    vec w = m.mass;
    for (double& e : w) e += floor / static_cast<double>(n);
    const vec leverages = pooled_leverage(h);
    const std::vector<bool> always = protected_slots(h, sinks, recent);
    int standing_out = 0;
    for (std::size_t j = 0; j < n; ++j) {
      const double mean =
          std::accumulate(leverages.begin(), leverages.end(), 0.0) / static_cast<double>(n);
      standing_out += !always[j] && h.slots[j].single && leverages[j] > outlying * mean;
    }
    std::vector<bool> pin = pinned(h, always, leverages, std::min(most, standing_out));
    double raised = 0;
    if (by_scores) {
      const int free = target - sinks - recent;
      const int merged =
          clusters > 0 ? clusters
                       : std::max(1, static_cast<int>(std::floor((1 - score_share) * free + 0.5)));
      std::vector<std::size_t> scored;
      vec score;
      for (std::size_t j = 0; j < n; ++j) {
        score.push_back(h.slots[j].score);
        if (!always[j] && h.slots[j].single && score[j] > 0) scored.push_back(j);
      }
      const auto count = static_cast<std::size_t>(std::max(free - merged, 0));
      if (!scored.empty()) {
        pin = always;
        for (const std::size_t j : top(score, scored, count)) pin[j] = true;
        const auto kept = std::count(pin.begin(), pin.end(), true);
        raised = log_gain(pin_gain, static_cast<double>(kept), mean_slots, newest(h) + 1.0);
      }
    }
    const int pins = static_cast<int>(std::count(pin.begin(), pin.end(), true));
    if (pins >= target) throw std::invalid_argument("oracle: expected a slot for clusters");
    const mat x = fold_clusters::points(h, rows);
    std::vector<std::size_t> seed = fold_clusters::seeds(x, w, pin, target - pins);
    const std::vector<int> near = fold_clusters::assigned(x, w, pin, seed, rounds);

    head made = h;
    made.slots.clear();
    std::vector<bool> alone;
    for (std::size_t j = 0; j < n; ++j) {
      const auto c = std::find(seed.begin(), seed.end(), j);
      if (pin[j]) {
        made.slots.push_back(h.slots[j]);
        double& own = made.slots.back().log_mass;
        if (!always[j] && raised > own) own = raised;
      } else if (c != seed.end()) {
        std::vector<std::size_t> members;
        for (std::size_t i = 0; i < n; ++i)
          if (!pin[i] && near[i] == static_cast<int>(c - seed.begin())) members.push_back(i);
        made.slots.push_back(merged(h, m, j, members));
      } else {
        continue;
      }
      alone.push_back(pin[j]);
    }
    if (!rows.empty()) fit_values(made, alone, h, m);
    h = made;
  }

  void prompt(head& h, const tensor& given, const std::vector<int>& positions, int target) const;
  mat step(head& h, const mat& q, const vec& k, const vec& v, int target, int trigger = 0) const;

  void remember(head& h, const placed_queries& latest, const mat& own = {}) const;
  void score_decoded(head& h) const;
  std::vector<bool> pinned_by_scores(const head& h, int keep, double& raised) const;
  mat remembered(const head& h) const;
  void compress_step(head& h, int budget, int keep) const;
};

}  // namespace oracle

#include "oracle/fold_stream.hpp"
