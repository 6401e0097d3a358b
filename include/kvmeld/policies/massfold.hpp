// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::clamp
#include <array>
#include <cmath>  // std::log1p
#include <limits>
#include <vector>

#include "kvmeld/policies/declared.hpp"
#include "kvmeld/search/match.hpp"

namespace kvmeld::inline v0 {

namespace detail {

/// What a folding policy's name ends with.
inline constexpr std::string_view massfold_suffix = "+massfold";

template <class P>
inline constexpr auto massfold_name = [] {
  std::array<char, P::name().size() + massfold_suffix.size()> name{};
  std::ranges::copy(massfold_suffix, std::ranges::copy(P::name(), name.begin()).out);
  return name;
}();

/// `f` is called with a policy, or with the one inside it.
template <class P>
decltype(auto) with_policy(P& p, const auto& f) {
  if constexpr (chosen_at_run_time<std::remove_const_t<P>>) {
    return p.visit(f);
  } else {
    return f(p);
  }
}

}  // namespace detail

/// massfold (jg-codes 2026, github.com/jg-codes/kvfold) on any policy that evicts by a score of at
/// least 0, which it is but for what becomes of the others:
///   match   j goes to the kept slot i of largest cos(k_i, k_j) that is no sink
///   merge   w_j = exp(ln s_j − ln s_i), v_i ← (v_i + Σ w_j v_j)/(1 + Σ w_j),
///           β_i ← β_i + ln(1 + Σ w_j); keys stay
/// A slot that is protected has the largest score of those that compete, so that no w exceeds 1.
/// The original merges prompts alone. While decoding, a slot is scored by all that it stands for.
template <policy P>
struct massfold {
  P scorer = {};  ///< whose scores and state it takes

  std::string_view name() const {
    return detail::with_policy(scorer, []<class Q>(const Q&) {
      constexpr auto& name = detail::massfold_name<Q>;
      return std::string_view(name.data(), name.size());
    });
  }
  /// Those of `scorer`.
  static void each_option(auto& p, const auto& f) { kvmeld::each_option(p.scorer, f); }
  /// On each of several scorers, with its default parameters.
  static std::vector<massfold> on_each_scorer() requires detail::chosen_at_run_time<P> {
    std::vector<massfold> all;
    for (const P& one : P::every()) {
      all.push_back({one});
    }
    return all;
  }

  attention_support supports() const {
    attention_support can = declared(scorer).supports();
    can.alibi = can.one_memory = false;
    return can;
  }
  std::vector<slot_stat> slot_stats() const { return declared(scorer).slot_stats(); }
  index_t column_count() const { return declared(scorer).columns(); }
  std::size_t memory(index_t dim, index_t group, index_t capacity) const {
    return declared(scorer).memory(dim, group, capacity);
  }
  bool accepts(index_t target) const { return declared(scorer).accepts(target); }
  void validate() const { declared(scorer).validate(); }
  group_combine combine() const { return declared(scorer).combine(); }
  bool shares() const { return declared(scorer).shares(); }
  void shared_scores(const head_ref& head, const head_state& state, std::span<float> out) const {
    declared(scorer).shared_scores(head, state, out);
  }
  bool supports_decode() const { return declared(scorer).supports_decode(); }
  bool uses_attention() const { return declared(scorer).uses_attention(); }
  observation_needs needs() const { return declared(scorer).needs(); }
  kvmeld::prompt_use prompt_use() const { return declared(scorer).prompt_use(); }
  kvmeld::decode_use decode_use() const { return declared(scorer).decode_use(); }
  void observe(const head_ref& head, head_state& state, const auto& seen) const {
    declared(scorer).observe(head, state, seen);
  }

  void plan(const head_ref& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    detail::with_policy(scorer, [&]<class Q>(const Q& p) {
      static_assert(detail::scores_slots<const Q> && !detail::makes_plans<const Q>,
                    "kvmeld: massfold: expected a policy with a score and no plan of its own");
      const protection kept = declared(p).protects(head, target);
      fold(head, target, kept, detail::score_of(p, head, state), work, out);
    });
  }

 private:
  /// What differs from scorer to scorer: the slots that stay, and what each stands for.
  template <class Score>
  void fold(const head_ref& head, index_t target, const protection& kept, Score score,
            slot_scratch& work, merge_plan& out) const {
    const auto is_protected = protected_slots(head, kept);
    search::select(head.length(), target, is_protected, score, work);
    match_all_but(kept.sinks, head, work);
    const std::string_view named = name();
    float most = 0;
    for (index_t s = 0; s < head.length(); ++s) {
      if (is_protected(s)) {
        continue;
      }
      // NaN has rank −∞, and the least score there is.
      const auto own = static_cast<float>(score(s));
      expects(own >= 0 || own == lowest_score, named, ": expected scores of at least 0, got ", own,
              " for slot ", s);
      work.numbers[s] = std::clamp(own, 1e-30F, std::numeric_limits<float>::max());
      most = std::max(most, work.numbers[s]);
    }
    for (index_t s = 0; s < head.length(); ++s) {
      work.numbers[s] = is_protected(s) ? most : work.numbers[s];
    }
    merge_by_level(head, work, out);
  }
  /// Slots that leave go to the kept slot of largest cosine that is no sink.
  static void match_all_but(index_t sinks, const head_ref& head, slot_scratch& work) {
    search::match_by_cosine(head, work, [&](index_t s) { return head.position(s) >= sinks; });
  }
  /// The rows, by what each slot stands for, `work.numbers [length]`.
  static void merge_by_level(const head_ref& head, slot_scratch& work, merge_plan& out) {
    const auto& level = work.numbers;
    merge::write_rows(head, work, out, [&](std::span<const index_t> members) {
      const index_t anchor = members[0];
      float sum = 0;
      for (const index_t s : members.subspan(1)) {
        sum += level[s] / level[anchor];
      }
      out.add({anchor, 1, 1 / (1 + sum)});
      for (const index_t s : members.subspan(1)) {
        out.add({s, 0, level[s] / level[anchor] / (1 + sum)});
      }
      return head.log_mass(anchor) + std::log1p(sum);
    });
  }
};

/// On the policy `P`.
template <class P>
massfold(P) -> massfold<P>;

}  // namespace kvmeld::inline v0
