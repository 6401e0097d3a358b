// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::fill_n, std::ranges::count_if
#include <cmath>      // std::exp
#include <limits>     // std::numeric_limits

#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"
#include "kvmeld/search/match.hpp"

namespace kvmeld::inline v0 {

/// KVMerger (Wang et al. 2024, arXiv 2407.08454): runs of consecutive similar keys become one slot.
///   score   s_j ← s_j + Σ_g a_gj, summed when slots merge
///   select  none: the last R and the top H by s, sinks first, take no part and break runs
///   match   neighbours in position join when cos(k_{i−1}, k_i) > ε      algorithm 1
///   merge   pivot p: the member of largest s; g_i = exp(−‖k_p − k_i‖²/2σ²)
///           w_i = g_i/Σg    k = Σ w k    v = Σ w v                      algorithm 2, eqs. 6–8
///           β = ln|S|, in tokens (ours; the paper: v = |S| Σ w v, `scale_values`)
/// A slot of log-mass β_i counts as the e^β_i tokens that it holds, in |S|, σ and the weights.
/// σ = mean ‖k_p − k_i‖ / √2 (ours: eq. 6 defines it by itself). Every joined pair frees a slot, so
/// a budget is reached exactly by taking ε as an order statistic of the pairs' similarities (ours).
/// By `budget::shared` it is one ε for all heads of the model, as in the paper. Where all pairs
/// joined are too few, the runs of least total score are evicted.
struct kvmerger {
  /// What decides which slots join.
  enum class mode { threshold, budget };

  mode joins = mode::budget;  ///< budget: ε is whatever gives the target; threshold: at least that
  float epsilon = 0.75F;
  float recent = 0.25F;  // R
  float heavy = 0.25F;   // H
  index_t sinks = 4;
  float sigma = 0;
  bool scale_values = false;
  bool gaps_break = true;
  index_t period = 0;
  index_t share_slots = 0;  ///< no option: `sharing` sets what R and H are shares of; 0: the budget
  group_combine combine = group_combine::sum;

  static constexpr std::string_view name() { return "kvmerger"; }
  attention_support supports() const { return {.alibi = false, .one_memory = !scale_values}; }
  static constexpr std::tuple options{
      option("joins", &kvmerger::joins, 0, 1, "by 0 a threshold, 1 the budget"),
      option("epsilon", &kvmerger::epsilon, -1, 1,
             "the cosine at which neighbours join, by threshold"),
      option("recent", &kvmerger::recent, 0, below_1, "share of the budget for the latest tokens"),
      option("heavy", &kvmerger::heavy, 0, below_1,
             "share of the budget for heavy hitters, at least the sinks"),
      option("sinks", &kvmerger::sinks, 0, any_count, "first tokens, never evicted"),
      option("sigma", &kvmerger::sigma, 0, any_number,
             "of the weights; 0: each run's own (the paper: 5)"),
      option("scale_values", &kvmerger::scale_values,
             "are values multiplied by the size of a run, and log-mass 0? (the paper: 1)"),
      option("gaps_break", &kvmerger::gaps_break, "do only consecutive positions join?"),
      option("period", &kvmerger::period, 0, any_count,
             "slots freed at once in decode; 0: a sixteenth of the budget"),
      option(&kvmerger::combine)};
  /// Where heads share slots, also what their one ε goes by (`rank_to_share`).
  static constexpr column score{0, "score"}, shared_score{1, "shared_score", slot_reduce::max};
  static constexpr std::array columns{score, shared_score};
  std::span<const column> columns_used() const {
    return std::span(columns).first(share_slots > 0 ? 2 : 1);
  }
  /// This policy for a model whose heads share `slots` each on average: R and H are the same in
  /// every head. Refused: fewer slots than these and one more.
  kvmerger sharing(index_t slots, index_t = 0) const {
    kvmerger shared = *this;
    shared.share_slots = slots;
    const index_t fixed = shared.untouched(slots);
    expects(fixed < slots, "kvmerger: expected more slots to share than ", fixed,
            " that take no part, got ", slots);
    return shared;
  }
  /// One ε for all heads of a model compares cosines, not attention: a slot's unit is how little it
  /// is like its left neighbour, −cos ≤ 1; 3 and its share of attention where a run begins, which
  /// goes by eviction alone; and no bound for heavy hitters, which always stay.
  static constexpr bool shares() { return true; }
  void shared_scores(const kv_head auto&, const head_state& state, std::span<float> out) const {
    std::ranges::copy(state.column(shared_score), out.begin());
  }
  /// Where heads share slots: R, and H without the sinks.
  index_t shared_recent() const { return share_of(recent, share_slots); }
  index_t shared_heavy() const { return heavy_places(share_slots) - sinks; }  ///< `H` in slots
  index_t min_budget() const {
    return search::least_target(std::max(sinks, index_t{1}),
                                [&](index_t target) { return untouched(target) < target; });
  }
  /// Two shares have no closed form: a target that fits needs no search for the least.
  bool accepts(index_t target) const {
    const bool fits = target >= std::max(sinks, index_t{1}) && target <= search::max_tokens &&
                      untouched(target) < target;
    return fits || target >= min_budget();
  }
  index_t eviction_batch(index_t slots) const {
    return period > 0 ? period - 1 : std::max(slots / 16, index_t{1}) - 1;
  }
  static constexpr observation_needs needs() { return {.probabilities = true}; }
  void validate() const {
    expects(recent + heavy < 1, "kvmerger: expected shares recent and heavy together below 1, got ",
            recent, " and ", heavy);
    search::expect_count(name(), "shared slots", share_slots, 0);
  }

  void observe(const kv_head auto&, head_state& state, const observation& observed) const {
    score::accumulate(state.column(score), observed.attention);
  }

  void observe(const kv_head auto& head, head_state& state,
               const query_view<float>& queries) const {
    score::accumulate(state.column(score), head, queries, combine);
    if (share_slots > 0) {
      rank_to_share(head, state);
    }
  }
  /// What of a head's slots stays longest as ε falls: heavy hitters, the first of each run by
  /// attention, then what is least similar to its left neighbour.
  void rank_to_share(const kv_head auto& head, head_state& state) const {
    slot_scratch work;
    mark_untouched(head, state, share_slots, work);
    pair_neighbours(head, work);
    const auto out = state.column(shared_score);
    score::write_shares(state.column(score), combine, head.group(),
                        static_cast<double>(state.observed()), out);
    constexpr float most = std::numeric_limits<float>::max() / 2, first = 3, unlike = 2;
    for (std::size_t s = 0; s < out.size(); ++s) {
      out[s] = work.marks[s] != 0 ? most : out[s] > 0 ? first + std::min(out[s], most / 2) : first;
    }
    for (const index_t i : work.row_of) {
      out[as_size(work.order[as_size(i)])] = std::min(-work.numbers[as_size(i)], unlike);
    }
  }

  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    mark_untouched(head, state, target, work);
    join(head, target, work);
    name_by_pivot(search::column_score(state.column(score)), work);
    // More rows than the target: of the runs those of largest total score are kept.
    const auto total = [&](std::span<const index_t> members) {
      if (work.marks[members[0]] == apart) {
        return std::numeric_limits<float>::infinity();
      }
      float sum = 0;
      for (const index_t s : members) {
        sum += state.column(score)[as_size(s)];
      }
      return std::isnan(sum) ? std::numeric_limits<float>::lowest() : sum;  // last of the anchors
    };
    merge::keep_rows(
        head.length(), target, [](index_t) { return false; }, total, work);
    merge::write_rows(head, work, out, [&](std::span<const index_t> members) {
      return add_run(head, members, work, out);
    });
  }

 private:
  /// Flags in `work.marks`.
  static constexpr char apart = 1;   // takes no part
  static constexpr char joined = 2;  // with its left neighbour in `work.order`

  index_t heavy_places(index_t target) const { return std::max(sinks, share_of(heavy, target)); }
  /// What R and H are shares of, for a head of `target` slots.
  index_t shared(index_t target) const { return share_slots > 0 ? share_slots : target; }
  index_t untouched(index_t target) const {
    return share_of(recent, shared(target)) + heavy_places(shared(target));
  }

  /// The last R; the sinks and the top by score of the others, H together.
  void mark_untouched(const kv_head auto& head, const head_state& state, index_t target,
                      slot_scratch& work) const {
    const auto latest = search::protect(head, 0, share_of(recent, shared(target)));
    const auto is_protected = [&](index_t s) {
      return latest(head.position(s)) || head.position(s) < sinks;
    };
    index_t always = 0, places = heavy_places(shared(target));
    for (index_t s = 0; s < head.length(); ++s) {
      always += is_protected(s) ? 1 : 0;
      places -= is_protected(s) && !latest(head.position(s)) ? 1 : 0;
    }
    search::select(head.length(), always + std::max(places, index_t{0}), is_protected,
                   search::column_score(state.column(score)), work);
  }

  /// The slots in position order, `work.order`; of the pairs of neighbours that may join, the right
  /// ones' places in it, `work.row_of`, and by these the cosines, `work.numbers`.
  void pair_neighbours(const kv_head auto& head, slot_scratch& work) const {
    const index_t n = head.length();
    auto& order = work.order;
    auto& pairs = work.row_of;
    auto& cosines = work.numbers;
    order.clear(), pairs.clear();
    for (index_t s = 0; s < n; ++s) {
      order.push_back(s);
    }
    detail::sort_by_position(head, order, work.keyed);
    cosines.resize(std::max(cosines.size(), as_size(n)));
    for (index_t i = 1; i < n; ++i) {
      const index_t a = order[as_size(i - 1)], b = order[as_size(i)];
      const bool consecutive = head.position(b) == head.position(a) + 1;
      if (work.marks[a] == 0 && work.marks[b] == 0 && (consecutive || !gaps_break)) {
        cosines[as_size(i)] =
            rank(search::cosine(head, a, b, search::key_norm(head, a), search::key_norm(head, b)));
        pairs.push_back(i);
      }
    }
  }

  /// Algorithm 1: marks slots that join their left neighbours in position order, `work.order`.
  void join(const kv_head auto& head, index_t target, slot_scratch& work) const {
    pair_neighbours(head, work);
    auto& pairs = work.row_of;
    const auto at = [&](index_t i) { return work.order[as_size(i)]; };
    const auto u = [&](index_t i) { return work.numbers[as_size(i)]; };
    const index_t n = head.length();
    const auto above = static_cast<index_t>(
        std::ranges::count_if(pairs, [&](index_t i) { return u(i) > epsilon; }));
    const index_t wanted = joins == mode::budget ? n - target : std::max(n - target, above);
    if (wanted < static_cast<index_t>(pairs.size())) {
      detail::select_slots(
          pairs, wanted, [&](index_t i) { return detail::ascending(std::pair(-u(i), at(i - 1))); },
          work.keyed);
      pairs.resize(as_size(wanted));
    }
    for (const index_t i : pairs) {
      work.marks[at(i)] = joined;
    }
  }

  /// Every run of joined neighbours goes to its member of largest score, ties to the lower slot.
  template <class Score>
  void name_by_pivot(Score score_of, slot_scratch& work) const {
    const auto& order = work.order;
    auto& into = work.row_of;
    into.assign(order.size(), -1);
    for (std::size_t begin = 0, end = 0; begin < order.size(); begin = end) {
      index_t pivot = order[begin];
      for (end = begin + 1; end < order.size() && work.marks[order[end]] == joined; ++end) {
        const index_t s = order[end];
        const float x = score_of(s), y = score_of(pivot);
        pivot = x > y || (x == y && s < pivot) ? s : pivot;
      }
      for (std::size_t i = begin; i < end; ++i) {
        into[as_size(order[i])] = pivot;
      }
    }
  }

  /// Algorithm 2 and eqs. 6–8. The log-mass of the merged slot.
  float add_run(const kv_head auto& head, std::span<const index_t> members, slot_scratch& work,
                merge_plan& out) const {
    const index_t pivot = members[0];
    constexpr float infinite = std::numeric_limits<float>::infinity();
    float most = head.log_mass(pivot);
    for (const index_t m : members) {
      most = std::max(most, head.log_mass(m));
    }
    const auto tokens = [&](std::size_t i) {  // relative to the member of most; none is without
      const float less = scale_values ? 0 : head.log_mass(members[i]) - most;
      return less == 0 ? 1.0F : std::max(std::exp(less), 1e-30F);
    };
    auto& g = work.numbers;
    float size = 0, mean_distance = 0, sum = 0, held = 0;
    for (std::size_t i = 0; i < members.size(); ++i) {
      size += tokens(i);
    }
    for (std::size_t i = 0; i < members.size(); ++i) {
      // The pivot's own is 0 whatever it holds; NaN: the key holds NaN, and its slot is evicted.
      g[i] = i == 0 ? 0.0F
                    : score::squared_distance(head.key(pivot), head.key(members[i]), head.dim());
      if (g[i] < infinite) {  // else further away than floats can say: of no weight
        mean_distance += tokens(i) * std::sqrt(g[i]) / size;  // the pivot's 0 counts
      }
    }
    const float s = sigma > 0 ? sigma : std::max(mean_distance / std::sqrt(2.0F), 1e-6F);
    for (std::size_t i = 0; i < members.size(); ++i) {
      g[i] = g[i] == infinite ? 0 : tokens(i) * std::exp(-g[i] / (2 * s * s));
      sum += g[i] >= 0 ? g[i] : 0;
    }
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (const float w = g[i] / sum; w >= 0) {
        out.add({members[i], w, scale_values ? size * w : w});
        held += tokens(i);
      }
    }
    return scale_values ? head.log_mass(pivot) : most + std::log(held);
  }
};

}  // namespace kvmeld::inline v0
