// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::min
#include <cmath>      // std::exp
#include <limits>     // std::numeric_limits
#include <vector>

#include "kvmeld/merge/fit.hpp"
#include "kvmeld/merge/nnls.hpp"
#include "kvmeld/policies/policy.hpp"

namespace kvmeld::inline v0 {

/// Attention Matching (arXiv 2602.16284): some keys are kept, their log-mass and values are fitted
/// so that mass and outputs on the reference queries are the full cache's.
///   score   basic: root of mean squared attention on the queries. omp: orthogonal matching pursuit
///           on the mass: `Aᵀ(t − A x)`, the gain in what is still missing
///   select  sinks, the latest, then the top by score, in omp a few a round
///   match   none: the others are evicted; masses and values of the kept make up for them
///   merge   x_r = exp(β_r) ≥ 0 of least ‖A x − t‖², A_qr = exp(scale·q·k_r − top_q),
///           t_q = Σ_j exp(ℓ_qj − top_q), top_q the full cache's largest logit; then values by
///           ridge least squares around the kept tokens' own (the paper: around 0)
/// Prompt only. Every query sees every slot: it stands for future queries. Holds
/// `[group · queries, length]` doubles. `omp` may keep fewer slots than the budget, and does where
/// there are fewer query rows than slots to keep.
struct attention_matching {
  bool omp = false;
  index_t sinks = 4;
  index_t recent = 0;
  float ridge = 2e-4F;
  index_t a_round = 4;
  float drop = -7;
  float floor = -30;
  static constexpr bool supports_decode() { return false; }

  static constexpr std::string_view name() { return "attention_matching"; }
  static constexpr std::tuple options{
      option("omp", &attention_matching::omp, "are slots chosen by orthogonal matching pursuit?"),
      option("sinks", &attention_matching::sinks, 0, any_count, "first tokens, never evicted"),
      option("recent", &attention_matching::recent, 0, any_count, "latest tokens, never evicted"),
      option("ridge", &attention_matching::ridge, 0, any_number,
             "of the fit of values, relative to the trace of its matrix; 0: no fit"),
      option("a_round", &attention_matching::a_round, 1, any_count,
             "with omp=1: slots that join before the next fit"),
      option("drop", &attention_matching::drop, any_negative, any_number,
             "with omp=1: log-mass below which a chosen slot is dropped"),
      option("floor", &attention_matching::floor, any_negative, any_number,
             "log-mass of a slot whose fit is less")};
  protection protects(const kv_head auto&, index_t) const {
    return {.sinks = sinks, .recent = recent};
  }
  kvmeld::prompt_use prompt_use() const { return {.plans = prompt_use::planned::spread}; }

  void plan(const kv_head auto&, const head_state&, index_t, slot_scratch&, merge_plan&) const {
    expects(false, "attention_matching: expected reference queries");
  }

  void plan(const kv_head auto& head, const head_state&, const query_view<float>& reference,
            index_t target, slot_scratch&, merge_plan& out) const {
    // Types that depend on the head's: what is made of them is compiled where it is used.
    const auto queries = dense::queries(reference, head.group(), head.dim());
    const auto keys = dense::keys(head), values = dense::values(head);
    const score::logit_terms terms(head);
    const auto full = mass_of<double>(queries, keys, dense::log_mass(head), terms);
    slots kept, others;
    const auto is_protected = search::protect(head, sinks, recent);
    for (index_t s = 0; s < head.length(); ++s) {
      (is_protected(head.position(s)) ? kept : others).push_back(s);
    }
    expects(static_cast<index_t>(kept.size()) <= target,
            "attention_matching: expected a budget of at least ", kept.size(),
            " slots (protected), got ", target);
    if (omp) {
      pursue(full, kept, others, as_size(target));
    } else {
      join(full.squares, as_size(target), kept, others);
    }
    std::ranges::sort(kept);

    const auto a = full.mass(Eigen::all, kept).eval();
    const auto x = merge::nnls(products(a, a), a.transpose() * full.total);
    const dense::vector beta =
        x.unaryExpr([&](double mass) { return log_mass(mass); }).template cast<float>();
    const auto key = keys(kept, Eigen::all).eval(), value = values(kept, Eigen::all).eval();
    auto missing = dense::attend(queries, keys, values, dense::log_mass(head), terms).output;
    const auto p = merge::probabilities(queries, key, beta, terms);
    dense::add_product(-1, p, value, missing);
    const auto delta = merge::ridge_values(p, missing, ridge);
    out.reset(head.length());
    for (std::size_t r = 0; r < kept.size(); ++r) {
      out.keep(kept[r], beta[static_cast<Eigen::Index>(r)]);
    }
    out.correct_values({delta.data(), as_size(delta.size())}, head.value_dim());
  }

 private:
  using slots = std::vector<index_t>;
  template <class Real>
  using vector = Eigen::Matrix<Real, Eigen::Dynamic, 1>;

  /// `aᵀ b`
  template <class Real>
  static auto products(const dense::matrix_of<Real>& a, const dense::rowwise auto& b) {
    dense::matrix_of<Real> m = dense::matrix_of<Real>::Zero(a.cols(), b.cols());
    dense::add_transposed_product(1, a, b, m);
    return m;
  }

  /// The full cache on the queries, in double: what is still missing is a small difference.
  template <class Real>
  struct full_mass {
    // [queries, length] A: without log-mass, which is what is sought. Row by row: so it is made.
    dense::matrix_of<Real> mass;
    vector<Real> total;    // [queries] t
    vector<Real> squares;  // [length] Σ_q p_qj²
  };
  template <class Real>
  static full_mass<Real> mass_of(const dense::stored auto& queries, const dense::stored auto& keys,
                                 const dense::stored auto& log_mass,
                                 const score::logit_terms& terms) {
    full_mass<Real> of{dense::matrix_of<Real>(queries.rows(), keys.rows()),
                       vector<Real>(queries.rows()), vector<Real>::Zero(keys.rows())};
    auto& [mass, total, squares] = of;
    const dense::matrix_of<Real> q = queries.template cast<Real>(), k = keys.template cast<Real>();
    dense::set_product_transposed(Real{terms.scale()}, q, k, mass);
    terms.cap_logits(mass.array());
    const Eigen::Matrix<Real, 1, Eigen::Dynamic> beta = log_mass.transpose().template cast<Real>();
    auto e = beta;
    for (Eigen::Index i = 0; i < mass.rows(); ++i) {
      e = mass.row(i) + beta;
      const Real top = e.maxCoeff(),
                 sink = std::exp(Real{terms.sink_of_row(i, q.rows()).max} - top);
      e = (e.array() - top).exp();
      total[i] = e.sum();
      squares += (e / (total[i] + sink)).cwiseAbs2().transpose();
      mass.row(i) = (mass.row(i).array() - top).exp();
    }
    return of;
  }

  double log_mass(double x) const { return x > 0 ? std::max(std::log(x), double{floor}) : floor; }

  /// Moves the best of the others by `score [length]` into `kept`, until it has `size`. Ties to the
  /// lower slot, NaN last.
  static void join(const dense::stored auto& score, std::size_t size, slots& kept, slots& others) {
    const auto key = [&](index_t s) {
      return detail::descending(std::isnan(score[s]) ? -std::numeric_limits<double>::infinity()
                                                     : score[s]);
    };
    const auto joining = static_cast<index_t>(std::min(size - kept.size(), others.size()));
    std::vector<detail::keyed_slot> keyed;
    detail::select_slots(others, joining, key, keyed);
    detail::sort_slots(std::span(others).first(as_size(joining)), key, keyed);
    kept.insert(kept.end(), others.begin(), others.begin() + joining);
    others.erase(others.begin(), others.begin() + joining);
  }

  /// Orthogonal matching pursuit: `kept` grows to `target`, or until there are no others.
  template <class Real>
  void pursue(const full_mass<Real>& full, slots& kept, slots& others, std::size_t target) const {
    const std::size_t safe = kept.size();
    dense::matrix_of<Real> a = full.mass(Eigen::all, kept), gram = products(a, a);
    vector<Real> x = merge::nnls(gram, a.transpose() * full.total);
    while (kept.size() < target && !others.empty()) {
      const vector<Real> gain = full.mass.transpose() * (full.total - a * x);
      join(gain, std::min(target, kept.size() + as_size(a_round)), kept, others);
      // Only the added slots' products are new, and the last solution is where the next begins.
      const Eigen::Index before = a.cols(), now = static_cast<Eigen::Index>(kept.size());
      a = full.mass(Eigen::all, kept);
      gram.conservativeResize(now, now);
      gram.rightCols(now - before) = products(a, a.rightCols(now - before));
      gram.bottomRows(now - before) = gram.rightCols(now - before).transpose().eval();
      vector<Real> start = vector<Real>::Zero(now);
      start.head(before) = x;
      x = merge::nnls(gram, a.transpose() * full.total, start);
      std::vector<Eigen::Index> staying;
      for (Eigen::Index r = 0; r < now; ++r) {
        if (as_size(r) < safe || log_mass(x[r]) >= drop) {
          staying.push_back(r);
        }
      }
      if (staying.size() < kept.size()) {
        slots left;
        for (const Eigen::Index r : staying) {
          left.push_back(kept[as_size(r)]);
        }
        kept = left;
        a = a(Eigen::all, staying).eval(), x = x(staying).eval();
        gram = gram(staying, staying).eval();
      }
    }
  }
};

}  // namespace kvmeld::inline v0
