// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>    // std::exp, std::log
#include <numbers>  // std::numbers::e_v

#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"
#include "kvmeld/score/tile_products.hpp"
#include "kvmeld/search/match.hpp"

namespace kvmeld::inline v0 {

namespace detail {

/// D2O, eq. 10: `τ_t = β m_t + (1 − β) τ_{t−1}`; the first `m_t` is the first τ. `multiply_add` is
/// the host's or the device's.
template <class MultiplyAdd>
KVMELD_HD float d2o_threshold(float beta, float m, bool has_last, float last,
                              MultiplyAdd multiply_add) {
  return has_last ? multiply_add(beta, m, (1 - beta) * last) : m;
}

}  // namespace detail

/// D2O (Wan et al. 2024, arXiv 2406.13035), per token and per head as the paper has it (the
/// authors' code shares threshold and filter between heads). Layer budgets: `layer_budgets`.
///   score   s_j ← s_j + Σ_g a_gj                                       eq. 6
///   select  sinks, M recent, the top N of the rest by s, N:M = 3:1     eqs. 7–8
///   match   u_ij = cos(k_i, k_j), j* = argmax_j u_ij over all kept     eq. 9
///           max_j u_ij < τ_t: evicted; τ_t = β m_t + (1 − β) τ_{t−1}, m_t the mean of
///           max_j u_ij over the evicted, τ_0 = m_0                     eq. 10
///   merge   k_j ← (e k_j + Σ_i exp(u_ij) k_i)/Z, values alike          eqs. 11–12
/// Protected slots absorb too; score and log-mass of a slot that absorbs stay its own. Where tokens
/// count (ours), β is the logarithm of a slot's tokens, and each of them has its slot's weight.
struct d2o {
  /// The authors' code: `(k_j + Σ_i u_ij k_i)/(1 + n)` of the n that join, values alike.
  enum class weighting { paper, code };

  float recent = 0.25F;
  index_t sinks = 4;
  float beta = 0.7F;
  bool counts = false;
  weighting weights = weighting::paper;
  group_combine combine = group_combine::sum;

  static constexpr std::string_view name() { return "d2o"; }
  static constexpr attention_support supports() { return {.alibi = false}; }
  static constexpr std::tuple options{
      option("recent", &d2o::recent, 0, below_1,
             "share of the budget without its sinks for the latest tokens"),
      option("sinks", &d2o::sinks, 0, any_count, "first tokens, never evicted"),
      option("beta", &d2o::beta, 0, 1, "how much of a new mean enters the threshold"),
      option("mass", &d2o::counts, "do slots count their tokens, in log-mass and in merges?"),
      option("weights", &d2o::weights, 0, 1, "0 the paper's, 1 the authors' code's"),
      option(&d2o::combine)};
  static constexpr column score{0, "score", slot_reduce::anchor};
  static constexpr std::array columns{score};
  /// Where the state's memory has what is kept of a head.
  enum memory_name : std::size_t { threshold, has_threshold };  // τ_t; 1 once there is one
  static constexpr std::size_t memory(index_t, index_t, index_t) { return 2; }
  index_t min_budget() const { return sinks + 1; }
  protection protects(const kv_head auto&, index_t target) const {
    return {.sinks = sinks, .recent = share_of(recent, target - sinks)};
  }
  static constexpr observation_needs needs() { return {.probabilities = true}; }

  static constexpr bool shares() { return true; }
  void shared_scores(const kv_head auto& head, const head_state& state,
                     std::span<float> out) const {
    score::write_shares(state.column(score), combine, head.group(),
                        static_cast<double>(state.observed()), out);
  }

  void observe(const kv_head auto&, head_state& state, const observation& observed) const {
    score::accumulate(state.column(score), observed.attention);
  }

  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    score::accumulate(state.column(score), head, queries, combine);
  }

  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    search::select(head.length(), target, protected_slots(head, protects(head, target)),
                   search::column_score(state.column(score)), work);
    const auto u = search::match_by_cosine(head, work);
    const auto at = [](const auto& x, index_t s) -> auto& { return x[as_size(s)]; };
    double sum = 0;
    for (index_t s = 0; s < head.length(); ++s) {
      sum += at(work.marks, s) != 0 ? 0 : double{at(u, s)};
    }
    const auto m = static_cast<float>(sum / (head.length() - target));
    const float tau = next_threshold(state, m);
    for (std::size_t s = 0; s < u.size(); ++s) {
      if (work.marks[s] == 0 && u[s] < tau) {
        work.row_of[s] = -1;
      }
    }
    merge::write_rows(head, work, out, [&](std::span<const index_t> members) {
      return merged(
          head, members, [&](index_t i) { return at(u, i); },
          [&](index_t s, float w) {
            out.add({s, w, w});
          });
    });
    out.set_measured(m);
  }

  /// eq. 10: what a change has measured enters the threshold. Keys of NaN measure nothing.
  void update_memory(const kv_head auto&, head_state& state, const merge_plan& change,
                     slot_scratch&) const {
    if (const auto m = change.measured(); m && !std::isnan(*m)) {
      state.memory()[threshold] = next_threshold(state, *m);
      state.memory()[has_threshold] = 1;
    }
  }

 private:
  /// Eqs. 11–12: slot `members[0]` with the others, which are `alike(i)`, u_ij, to it. Calls
  /// `add(slot, weight)` for each; the log-mass afterwards.
  template <class Alike, class Add>
  KVMELD_NOINLINE float merged(const kv_head auto& head, std::span<const index_t> members,
                               Alike alike, Add add) const {
    const bool paper = weights == weighting::paper;
    const index_t j = members[0];
    const auto tokens = [&](index_t s) { return counts ? std::exp(head.log_mass(s)) : 1.0F; };
    const auto weight = [&](index_t s) {  // the kept key's self-similarity is 1
      return s == j ? tokens(s) * (paper ? std::numbers::e_v<float> : 1.0F)
                    : tokens(s) * (paper ? std::exp(alike(s)) : alike(s));
    };
    float z = 0, all = 0;
    for (const index_t s : members) {
      z += paper ? weight(s) : tokens(s);
      all += tokens(s);
    }
    for (const index_t s : members) {
      add(s, weight(s) / z);
    }
    return counts ? std::log(all) : head.log_mass(j);
  }

  float next_threshold(const head_state& state, float m) const {
    const auto now = state.memory();
    return detail::d2o_threshold(beta, m, now[has_threshold] != 0, now[threshold],
                                 detail::multiply_add);
  }
};

}  // namespace kvmeld::inline v0
