// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::max
#include <cmath>      // std::log

#include "kvmeld/merge/merge_rows.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"
#include "kvmeld/search/match.hpp"

namespace kvmeld::inline v0 {

/// ZSMerge (Liu et al. 2025, arXiv 2503.10714): a ring of the latest, the top by decayed attention,
/// and residual slots that absorb the rest.
///   score   s_j ← λ s_j + a_j                                         eq. 5
///   select  proximity Bp (ring), context Bc = B − Bp − Br by s, residual Br
///   match   r = argmax_r k_r·k_c over the residual slots               eq. 6
///   merge   running mean by w, w_r ← w_r + w_c                         eq. 7
///           log-mass β = α ln w                                        eq. 8
/// Below float the running means are kept in float too, in the state's memory (ours): what is
/// stored is their rounding, which alone would soon stand still.
struct zsmerge {
  /// A prompt's residuals: equal chunks in position order (authors), or eq. 6 against `residual`
  /// seeds, the highest scores among the evicted (ours).
  enum class prompt_mode { chunked, nearest };

  float proximity = 0.1F;
  index_t residual = 1;  // Br
  index_t sinks = 4;
  float alpha = 0.6F;
  float decay = 0.98F;  // λ
  prompt_mode prompt = prompt_mode::chunked;
  bool new_token_competes = true;
  slot_reduce merged_score = slot_reduce::max;
  group_combine combine = group_combine::sum;

  static constexpr std::string_view name() { return "zsmerge"; }
  static constexpr attention_support supports() { return {.alibi = false}; }
  static constexpr std::tuple options{
      option("proximity", &zsmerge::proximity, 0, below_1,
             "share of the budget for the ring, at least 2 slots"),
      option("residual", &zsmerge::residual, 1, any_count, "slots that absorb the rest"),
      option("sinks", &zsmerge::sinks, 0, any_count,
             "first tokens that are always in the context (the paper: 0)"),
      option("alpha", &zsmerge::alpha, 0, any_number, "of log-mass; to 1 theorem 3.1 holds"),
      option("decay", &zsmerge::decay, above_0, 1, "of the scores, per query"),
      option("prompt", &zsmerge::prompt, 0, 1,
             "residuals of a prompt: 0 equal chunks (authors), 1 by eq. 6 (ours)"),
      option("new_token_competes", &zsmerge::new_token_competes,
             "may the token that has just passed the ring be evicted? (authors: 0)"),
      option("merged_score", &zsmerge::merged_score, 0, 1,
             "of a residual: 0 the sum, 1 the largest"),
      option(&zsmerge::combine)};
  static constexpr column score{0, "score"}, count{1, "count", slot_reduce::sum, 1},
      is_residual{2, "is_residual", slot_reduce::max};
  static constexpr std::array columns{score, count, is_residual};
  std::array<slot_stat, 3> slot_stats() const {
    return {slot_stat{merged_score}, slot_stat{count.reduce, count.initial},
            slot_stat{is_residual.reduce}};
  }
  std::size_t memory(index_t dim, index_t, index_t) const {
    return merge::float_rows::floats(residual, dim);
  }
  index_t min_budget() const {
    // So many that the context is larger than the sinks; from the first on the ring has its 2
    // slots.
    return search::least_target(residual + sinks + 3, proximity, residual + sinks + 1);
  }
  static constexpr observation_needs needs() { return {.probabilities = true}; }

  static constexpr bool shares() { return true; }
  void shared_scores(const kv_head auto& head, const head_state& state,
                     std::span<float> out) const {
    const auto n = static_cast<double>(state.observed());
    const double all = decay < 1 ? (1 - std::pow(double{decay}, n)) / (1 - double{decay}) : n;
    score::write_shares(state.column(score), combine, head.group(), all, out);
  }

  void observe(const kv_head auto&, head_state& state, const observation& observed) const {
    score::accumulate(state.column(score), observed.attention, decay);
  }

  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    std::vector<float> decayed(as_size(head.length()));
    column_scores(head, queries, {.decay = decay, .combine = combine}, {.decayed = decayed});
    const auto age = static_cast<float>(std::pow(double{decay}, queries.count));
    score::accumulate(state.column(score), decayed, age);
  }

  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    const index_t missing = residual - residual_slots(head, state);  // fresh residual slots to make
    search::select(head.length(), target - missing,
                   is_protected(head, state, target, missing == 0 && !new_token_competes),
                   search::column_score(state.column(score)), work);
    auto& into = work.row_of;
    auto& rest = work.order;
    into.assign(as_size(head.length()), -1);
    rest.clear();
    for (index_t s = 0; s < head.length(); ++s) {
      if (work.marks[s] != 0) {
        into[as_size(s)] = s;
      } else {
        rest.push_back(s);
      }
    }
    if (missing == residual && prompt == prompt_mode::chunked) {
      detail::sort_by_position(head, rest, work.keyed);
      chunk(rest, into);
    } else {
      const auto of = search::column_score(state.column(score));
      detail::sort_slots(
          rest, [&](index_t s) { return detail::descending(of(s)); }, work.keyed);
      auto& absorb = work.places;
      absorb.clear();
      for (index_t s = 0; s < head.length(); ++s) {
        if (residual_slot(state, s)) {
          absorb.push_back(s);
        }
      }
      for (std::size_t i = 0; i < rest.size(); ++i) {
        const index_t c = rest[i];
        if (static_cast<index_t>(i) < missing) {
          absorb.push_back(c);
          into[c] = c;
        } else {
          into[c] = search::nearest_by_dot(head, c, absorb);
        }
      }
    }
    write_rows(head, state, work, out);
  }

  /// The means in float, before the slots that they take in are removed.
  void update_memory(const kv_head auto& head, head_state& state, const merge_plan& change,
                     slot_scratch&) const {
    change.each_changed_row([&](index_t r) {
      if (rounds(head) && change.row(r).size() > 1) {
        means(head, state).merge(head, change.row(r));
      }
    });
  }

  /// Stores the means. Names the residual slots: whatever is merged; then, while context overflows
  /// and a residual slot is free, the context's lowest (Algorithm 1, line 8), where it lies.
  void after_compress(const kv_head auto& head, head_state& state, index_t target) const {
    if (rounds(head)) {
      means(head, state).store(head);
    }
    const auto flag = state.column(is_residual);
    for (index_t s = 0; s < head.length(); ++s) {
      flag[as_size(s)] = residual_slot(state, s) || tokens(state, s) > 1 ? 1.0F : 0.0F;
    }
    const auto in_ring = search::protect(head, 0, ring(target));
    index_t overflow = -context(target), free = residual - residual_slots(head, state);
    for (index_t s = 0; s < head.length(); ++s) {
      overflow += in_ring(head.position(s)) || residual_slot(state, s) ? 0 : 1;
    }
    for (; overflow > 0 && free > 0; --overflow, --free) {
      const index_t s = search::lowest_scored(
          head.length(), is_protected(head, state, target, !new_token_competes),
          search::column_score(state.column(score)));
      flag[as_size(s)] = 1.0F;
    }
  }

 private:
  /// Is its storage of less precision than float?
  static bool rounds(const kv_head auto& head) {
    return head.length() > 0 &&
           (detail::floats_in(head.key(0)) == nullptr || head.type().values != storage::f32);
  }
  merge::float_rows means(const kv_head auto& head, head_state& state) const {
    return {state.memory(), residual, head};
  }
  index_t ring(index_t target) const { return std::max(index_t{2}, share_of(proximity, target)); }
  index_t context(index_t target) const { return target - ring(target) - residual; }

  static float tokens(const head_state& state, index_t s) {
    return state.column(count)[as_size(s)];
  }
  static bool residual_slot(const head_state& state, index_t s) {
    return state.column(is_residual)[as_size(s)] != 0.0F;
  }
  index_t residual_slots(const kv_head auto& head, const head_state& state) const {
    index_t n = 0;
    for (index_t s = 0; s < head.length(); ++s) {
      n += residual_slot(state, s) ? 1 : 0;
    }
    return n;
  }
  /// Sinks, the ring and the residual slots; by the authors' rule, the new token of the context
  /// too.
  auto is_protected(const kv_head auto& head, const head_state& state, index_t target,
                    bool authors_rule) const {
    const index_t latest = ring(target) + (authors_rule ? 1 : 0);
    return [&head, absorbs = state.column(is_residual),
            kept = search::protect(head, sinks, latest)](index_t s) {
      return (static_cast<int>(kept(head.position(s))) |
              static_cast<int>(absorbs[as_size(s)] != 0.0F)) != 0;
    };
  }

  /// `residual` runs of the rest in position order, the first ones a token longer; each run's rows
  /// go into its lowest slot.
  void chunk(const std::vector<index_t>& rest, std::vector<index_t>& into) const {
    const auto n = static_cast<index_t>(rest.size());
    for (index_t c = 0, begin = 0; c < residual; ++c) {
      const index_t end = begin + n / residual + (c < n % residual ? 1 : 0);
      const auto run = std::span(rest).subspan(as_size(begin), as_size(end - begin));
      const index_t anchor = *std::ranges::min_element(run);
      for (const index_t s : run) {
        into[as_size(s)] = anchor;
      }
      begin = end;
    }
  }

  /// eq. 7: members weighted by their token counts; eq. 8: β = α ln w.
  void write_rows(const kv_head auto& head, const head_state& state, slot_scratch& work,
                  merge_plan& out) const {
    out.reset(head.length());
    merge::for_each_row(work, [&](std::span<const index_t> members) {
      const index_t r = members[0];
      if (work.marks[r] != 0 && !residual_slot(state, r)) {
        return out.keep(r, head.log_mass(r));
      }
      float w = 0;
      for (const index_t s : members) {
        w += tokens(state, s);
      }
      for (const index_t s : members) {
        out.add({s, tokens(state, s) / w, tokens(state, s) / w});
      }
      out.end_row(alpha * std::log(w));
    });
  }
};

}  // namespace kvmeld::inline v0
