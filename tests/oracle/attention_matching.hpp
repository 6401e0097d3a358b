// SPDX-License-Identifier: MIT
// Attention Matching (arXiv 2602.16284): keep some keys, fit their log-mass so that the mass of
// every reference query is that of the full cache, and their values so that the outputs are.
//
// Readings that the library follows:
//  - The queries given are the reference queries; all query heads of the group count as queries of
//    their own. They see all slots, whatever their positions: they stand for queries to come.
//  - Slots may carry log-mass: it counts in the full cache's mass, and is replaced in the kept.
//  - The mass match, for query row q and kept slot r, with top_q the full cache's largest logit:
//    A_qr = exp(cap(scale q.k_r) - top_q), t_q = sum_j exp(l_qj - top_q). A sink's mass is there
//    before and after: it is in no sum and no top_q, but in what slots share by attention.
//    min |A x - t|^2, x >= 0, x_r = exp(new beta_r). Rows are thus weighted by exp(-top_q): no row
//    overflows, and a query counts by its distribution rather than by its scale.
//  - x_r = 0, or less than exp(-30), becomes beta_r = -30: log-mass must be finite.
//  - basic: the `target` slots of largest sum_q p_qr^2 (the root and the mean change no order).
//  - omp: residual t - A x (x = 0 for what is not chosen); the 4 slots of largest (A^T residual)_r
//    join, whatever its sign, ties to the lower slot; all chosen are fitted again; those with
//    beta < -7 leave for good. Until `target` are chosen or none are left; the last round joins
//    only as many as are missing. If none are left, what remains is fitted once more, with the
//    floor at -30. So it may keep fewer than `target`, and does if there are fewer reference
//    queries than that: give it more.
//  - Sinks and recent slots are kept first, and count; they are fitted as the others are, and omp
//    does not drop them (their beta is at least -30).
//  - Values: ridge least squares around the kept tokens' own values, with
//    X = softmax(cap(scale q.k_r) + beta_r) over the kept and the full cache's outputs as the
//    target; ridge 2e-4 times the trace of X^T X. The paper regularises towards nothing.
//  - Positions and order are the kept slots' own. Prompt only: in decode, tokens are appended.
#pragma once

#include "oracle/nnls.hpp"
#include "oracle/policies.hpp"

namespace oracle {

struct attention_matching {
  bool omp = false;
  int sinks = 4;
  int recent = 0;
  double ridge = 2e-4;
  int a_round = 4;
  double drop = -7;    // omp: log-mass below which a chosen slot is dropped
  double least = -30;  // of log-mass

  /// What is to be matched.
  struct target_mass {
    mat rows;           // [q][dim]
    mat mass;           // [q][slots] A, of all slots
    vec total;          // [q] t
    mat probabilities;  // [q][slots]
    mat outputs;        // [q][dim]
  };
  static target_mass measured(const head& h, const tensor& queries) {
    target_mass m;
    const std::vector<bool> all(h.slots.size(), true);
    for (const mat& heads : queries)
      for (std::size_t g = 0; g < heads.size(); ++g) {
        const vec& q = heads[g];
        const vec l = logits_of(h, q, g);
        const double highest = *std::max_element(l.begin(), l.end());
        double lse = 0, total = 0;
        const vec p = probabilities(h, q, g, terms::nowhere, all, lse);
        vec a, o(h.values(), 0.0);
        for (std::size_t j = 0; j < l.size(); ++j) {
          a.push_back(std::exp(h.terms.alike(q, h.slots[j].key) - highest));
          total += std::exp(l[j] - highest);
          for (std::size_t i = 0; i < o.size(); ++i) o[i] += p[j] * h.slots[j].value[i];
        }
        m.rows.push_back(q);
        m.mass.push_back(a);
        m.total.push_back(total);
        m.probabilities.push_back(p);
        m.outputs.push_back(o);
      }
    return m;
  }

  /// x of the `kept` slots, in their order.
  static vec fitted(const target_mass& m, const std::vector<std::size_t>& kept) {
    mat a;
    for (const vec& row : m.mass) {
      a.emplace_back();
      for (std::size_t j : kept) a.back().push_back(row[j]);
    }
    return nnls(a, m.total);
  }
  double log_mass(double x) const { return x > 0 ? std::max(std::log(x), least) : least; }

  std::vector<std::size_t> choose_basic(const target_mass& m, const std::vector<bool>& safe,
                                        std::size_t target) const {
    vec score(safe.size(), 0.0);
    std::vector<std::size_t> kept, others;
    for (const vec& p : m.probabilities)
      for (std::size_t j = 0; j < p.size(); ++j) score[j] += p[j] * p[j];
    for (std::size_t j = 0; j < safe.size(); ++j) (safe[j] ? kept : others).push_back(j);
    for (std::size_t j : top(score, others, target - kept.size())) kept.push_back(j);
    return kept;
  }

  std::vector<std::size_t> choose_omp(const target_mass& m, const std::vector<bool>& safe,
                                      std::size_t target) const {
    std::vector<std::size_t> kept, others;
    for (std::size_t j = 0; j < safe.size(); ++j) (safe[j] ? kept : others).push_back(j);
    vec x = fitted(m, kept);
    while (kept.size() < target && !others.empty()) {
      vec gain(safe.size(), 0.0);
      for (std::size_t q = 0; q < m.total.size(); ++q) {
        double rest = m.total[q];
        for (std::size_t r = 0; r < kept.size(); ++r) rest -= m.mass[q][kept[r]] * x[r];
        for (std::size_t j : others) gain[j] += m.mass[q][j] * rest;
      }
      const auto joining = std::min(static_cast<std::size_t>(a_round), target - kept.size());
      for (std::size_t j : top(gain, others, joining)) {
        kept.push_back(j);
        others.erase(std::find(others.begin(), others.end(), j));
      }
      x = fitted(m, kept);
      std::vector<std::size_t> staying;
      vec masses;
      for (std::size_t r = 0; r < kept.size(); ++r) {
        if (!safe[kept[r]]) decided(log_mass(x[r]), drop, 1);
        if (safe[kept[r]] || log_mass(x[r]) >= drop) {
          staying.push_back(kept[r]);
          masses.push_back(x[r]);
        }
      }
      kept = staying;
      x = masses;
    }
    return kept;
  }

  void prompt(head& h, const tensor& queries, const std::vector<int>&, int target) const {
    if (static_cast<int>(h.slots.size()) <= target) return;
    if (queries.empty()) throw std::invalid_argument("oracle: expected reference queries");
    const std::vector<bool> safe = protected_slots(h, sinks, recent);
    if (static_cast<int>(std::count(safe.begin(), safe.end(), true)) > target)
      throw std::invalid_argument("oracle: expected a budget of at least the protected slots");
    const target_mass m = measured(h, queries);
    const auto room = static_cast<std::size_t>(target);
    std::vector<std::size_t> kept = omp ? choose_omp(m, safe, room) : choose_basic(m, safe, room);
    std::sort(kept.begin(), kept.end());
    const vec x = fitted(m, kept);
    head made = h;
    made.slots.clear();
    mat values;
    for (std::size_t r = 0; r < kept.size(); ++r) {
      decided(x[r], 0, 1e-3);  // a fit of less may be one of nothing
      made.slots.push_back(h.slots[kept[r]]);
      made.slots.back().log_mass = log_mass(x[r]);
      values.push_back(h.slots[kept[r]].value);
    }
    const mat p = attend(made, m.rows).probabilities;
    const mat fit = ridge_around(p, m.outputs, values, ridge);
    for (std::size_t r = 0; r < kept.size(); ++r) made.slots[r].value = fit[r];
    h = made;
  }

  mat step(head& h, const mat& q, const vec& k, const vec& v, int, int = 0) const {
    append(h, k, v);
    return attend(h, q).output;
  }
};

}  // namespace oracle
