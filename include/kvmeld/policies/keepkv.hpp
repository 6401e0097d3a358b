// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>   // std::isfinite
#include <limits>  // std::numeric_limits
#include <vector>

#include "kvmeld/policies/keepkv/estimate.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"
#include "kvmeld/search/match.hpp"

namespace kvmeld::inline v0 {

/// KeepKV (Tian et al. 2025, arXiv 2504.09936): votes, and merges that leave the output of a query
/// as it was (ZIP) whose s is what S estimates: of the present one with decay 0 and one query head
/// per KV head, else nearly. β_j = ln p_j, p_j votes; S_j the estimate of ln s_j,
/// s_j = exp(scale · q·k_j), over the group's heads the mean.
///   score   ln w_j = β_j + S_j; S by a moving average of s           eq. 8
///           begun anew with a prompt's last queries
///   select  sinks, the most recent, then the top of the rest by w
///   match   nearest by cosine, merged at `similarity` or above, else evicted
///   merge   ω_j = w_j / Σ w    k = r Σ ω k    v = Σ ω v             eqs. 7, 25, 26
///           r and the slot's β as `vote_merge` has them; its S is A − β, A = ln Σ w: it weighs
///           what its members weighed
/// A prompt is merged first, then evicted (table 3): in descending order of w, each slot joins its
/// most similar leader or becomes one. Appendix B.3's layer budgets are not a policy's.
struct keepkv {
  /// The authors' code never scales keys (r = 1, β = P), and estimates s by its mean over a window.
  enum class mode { paper, code };

  index_t sinks = 4;
  float recent = 0.5F;
  float similarity = 0.8F;
  mode variant = mode::paper;
  index_t window = 32;
  float decay = 0.9F;  // a of the moving average; ours
  bool merge_first = true;
  float epsilon = 1e-6F;
  float distance_weight = 1;
  bool measures_shares = false;  ///< no option: `sharing` sets it

  static constexpr std::string_view name() { return "keepkv"; }
  attention_support supports() const {
    return {.alibi = false, .one_memory = variant == mode::code};  // the paper's keys are scaled
  }
  static constexpr std::tuple options{
      option("sinks", &keepkv::sinks, 0, any_count, "first tokens, never evicted"),
      option("recent", &keepkv::recent, 0, below_1, "share of the budget for the latest tokens"),
      option("similarity", &keepkv::similarity, -1, 1, "the cosine at which keys may merge"),
      option("variant", &keepkv::variant, 0, 1, "0 the paper's, 1 the authors' code's"),
      option("window", &keepkv::window, 1, any_count,
             "queries of a prompt that count; with variant=1 in decode too"),
      option("decay", &keepkv::decay, 0, below_1, "of the average; 0: the present query alone"),
      option("merge_first", &keepkv::merge_first,
             "does a prompt merge before it evicts? With variant=0"),
      option("epsilon", &keepkv::epsilon, above_0, any_number, "added to the mean; with variant=1"),
      option("distance_weight", &keepkv::distance_weight, above_0, any_number,
             "of the latest query in selection (the authors: 1.2); with variant=1")};
  // S and W (paper); code: the window's rows
  static constexpr column log_score{0, "log_score"}, weight_sum{1, "weight_sum"};
  std::vector<slot_stat> slot_stats() const {
    const bool paper = variant == mode::paper;
    const float initial = paper ? 0 : detail::logit_window::not_seen;
    std::vector<slot_stat> all(as_size(estimates()), {slot_reduce::anchor, initial});
    if (measures_shares) {
      all.push_back({slot_reduce::sum});
    }
    return all;
  }
  index_t column_count() const { return estimates() + (measures_shares ? 1 : 0); }
  /// This policy where heads share slots: S knows no other head's sum, so attention is measured
  /// too.
  keepkv sharing(index_t, index_t = 0) const {
    keepkv shared = *this;
    shared.measures_shares = true;
    return shared;
  }
  /// The mean over the queries that count.
  static constexpr bool shares() { return true; }
  void shared_scores(const kv_head auto&, const head_state& state, std::span<float> out) const {
    std::ranges::copy(state.column(estimates()), out.begin());
  }
  std::size_t memory(index_t, index_t, index_t) const { return variant == mode::paper ? 0 : 1; }
  protection protects(const kv_head auto&, index_t target) const {
    return {.sinks = sinks, .recent = share_of(recent, target)};
  }
  index_t min_budget() const { return search::least_target(sinks + 1, recent, sinks); }
  /// Merges take precedence where a plan is given queries, as after a prompt.
  kvmeld::prompt_use prompt_use() const {
    return {true, window - 1, window, prompt_use::planned::latest, 1};
  }
  void validate() const {
    expects(distance_weight == 1 || variant == mode::code,
            "keepkv: expected variant=1 (code) with a distance_weight, got the paper's");
  }

 private:
  /// Columns of S, and what it is made of.
  index_t estimates() const { return variant == mode::paper ? 2 : window; }
  /// A prompt's estimate is that of its own last queries: what was before does not count on.
  void forget(head_state& state) const {
    if (variant == mode::paper) {
      std::ranges::fill(state.column(weight_sum), 0.0F);  // a slot that no query sees keeps its S
    } else {
      rows().clear(state);
    }
  }
  detail::logit_window rows() const { return {window}; }
  /// What takes in one more query.
  detail::estimates taken(head_state& state) const {
    if (variant == mode::paper) {
      return {
          .score = state.column(log_score), .weight = state.column(weight_sum), .average = {decay}};
    }
    return {.score = rows().next(state), .weight = {}};
  }

 public:
  void observe(const kv_head auto& head, head_state& state, const observation& step) const {
    expects(step.query != nullptr && !step.log_sum_exp.empty(),
            "keepkv: expected the step's query and log-sum-exp");
    detail::each_log_score(head, step, taken(state));
  }
  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    const auto given = queries.reference(window);
    const auto counted =
        variant == mode::code ? given.last(window) : given;  // a window has no more rows
    forget(state);
    std::vector<detail::estimates> of;
    of.reserve(as_size(counted.count));
    for (index_t i = 0; i < counted.count; ++i) {
      of.push_back(taken(state));
    }
    detail::each_log_score(head, counted, [&](index_t i, index_t first, const auto&... scores) {
      of[as_size(i)](first, scores...);
    });
    if (measures_shares) {
      const auto share = state.column(estimates());
      column_scores(head, counted, {}, {.total = share});
      score::write_shares(share, group_combine::sum, head.group(), counted.count, share);
    }
  }

  /// A prompt: merges first, then evicts.
  void plan(const kv_head auto& head, const head_state& state, const query_view<float>&,
            index_t target, slot_scratch& work, merge_plan& out) const {
    if (variant == mode::code || !merge_first) {
      return plan(head, state, target, work, out);
    }
    const auto held = is_protected(head, target);
    const index_t n = head.length();
    auto& into = work.row_of;
    work.marks.assign(as_size(n), 0);
    for (index_t s = 0; s < n; ++s) {
      work.marks[s] = held(s) ? 1 : 0;
    }
    search::join_leaders(head, ranks(head, state), similarity, n - target, work);
    auto& weight = work.numbers;  // ln w of the rows; −inf: not an anchor
    std::fill_n(weight.begin(), n, -std::numeric_limits<float>::infinity());
    index_t rows = 0;
    merge::for_each_row(work, [&](std::span<const index_t> members) {
      weight[as_size(members[0])] = static_cast<float>(merged(head, state, members).weight);
      ++rows;
    });
    if (rows > target) {
      search::select(n, target, held, search::column_score(weight), work);
      for (index_t& to : into) {
        to = work.marks[to] != 0 ? to : -1;
      }
    }
    write_rows(head, state, work, out);
  }

  /// Decode: selects, then merges into the selected what is near enough to one of them.
  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    auto& rank = work.numbers;
    const index_t n = head.length();
    rank.resize(std::max(rank.size(), as_size(n)));
    const auto of_slot = ranks(head, state);
    for (index_t s = 0; s < n; ++s) {
      rank[as_size(s)] = of_slot(s);
    }
    search::select(n, target, is_protected(head, target), search::column_score(rank), work);
    const auto cosine = search::match_by_cosine(head, work);
    for (std::size_t s = 0; s < cosine.size(); ++s) {
      if (work.marks[s] == 0 && !(cosine[s] >= similarity)) {
        work.row_of[s] = -1;
      }
    }
    write_rows(head, state, work, out);
  }

  /// The merged slots' estimates, before their members are removed.
  void update_memory(const kv_head auto& head, head_state& state, const merge_plan& change,
                     slot_scratch&) const {
    change.each_changed_row([&](index_t r) {
      if (change.row(r).size() > 1) {
        update_row(head, state, change.row(r), change.log_mass(r));
      }
    });
  }

 private:
  auto is_protected(const kv_head auto& head, index_t target) const {
    return protected_slots(head, sinks, share_of(recent, target));
  }
  /// An estimate that is no number weighs nothing next to others.
  static double finite(double x) { return std::isfinite(x) ? x : -1e30; }
  double estimate(const head_state& state, index_t s) const {
    if (variant == mode::paper) {
      return finite(double{state.column(log_score)[as_size(s)]});
    }
    return rows().mean(state, s, epsilon);
  }
  /// ln w
  double log_weight(const kv_head auto& head, const head_state& state, index_t s) const {
    return double{head.log_mass(s)} + estimate(state, s);
  }
  /// Slot ↦ what it is ranked by; the authors' code without the votes.
  auto ranks(const kv_head auto& head, const head_state& state) const {
    const auto of_code =
        rows().weighted_sums(state, variant == mode::code ? distance_weight : 1.0F);
    return [this, &head, &state, of_code](index_t s) {
      return static_cast<float>(variant == mode::paper ? log_weight(head, state, s)
                                                       : finite(of_code(s)));
    };
  }

  detail::vote_merge merged(const kv_head auto& head, const head_state& state,
                            std::span<const index_t> members) const {
    return detail::vote_merge::of(
        members, [&](index_t s) { return double{head.log_mass(s)}; },
        [&](index_t s) { return estimate(state, s); }, variant == mode::paper);
  }

  void write_rows(const kv_head auto& head, const head_state& state, slot_scratch& work,
                  merge_plan& out) const {
    merge::write_rows(head, work, out, [&](std::span<const index_t> members) {
      const detail::vote_merge made = merged(head, state, members);
      for (const index_t s : members) {
        const float w = made.share(log_weight(head, state, s));
        out.add({s, made.key_scale * w, w});
      }
      return made.log_mass;
    });
  }

  /// S of a merged row: A − β. Code: of each query the vote-weighted mean of its members' s, as far
  /// back as the anchor goes.
  void update_row(const kv_head auto& head, head_state& state, std::span<const merge_source> row,
                  float log_mass) const {
    const auto merged_score = [&](auto score_of) {
      const double a = detail::log_sum(row.size(), [&](std::size_t i) {
        const index_t s = row[i].source;
        return double{head.log_mass(s)} + score_of(s);
      });
      return static_cast<float>(a - double{log_mass});
    };
    const auto anchor = as_size(row.front().source);
    if (variant == mode::paper) {
      state.column(log_score)[anchor] = merged_score([&](index_t s) { return estimate(state, s); });
      return;
    }
    for (index_t c = 0; c < window; ++c) {
      float& now = state.column(c)[anchor];
      if (now != detail::logit_window::not_seen) {
        now =
            merged_score([&](index_t s) { return double{detail::logit_window::at(state, c, s)}; });
      }
    }
  }
};

}  // namespace kvmeld::inline v0
