// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::ranges::upper_bound

#include "kvmeld/detail/arena.hpp"
#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/merge/merge_rows.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/score/column_scores.hpp"

namespace kvmeld::inline v0 {

/// CaM (ICML 2024, "Cache merging for memory-efficient LLMs inference"): H2O, but by chance
/// the value of an evicted token is added to the tokens that follow it.
///   score   s_j ← s_j + Σ_g a_gj     attention over all queries so far
///   select  sinks, the most recent, then the top of the rest by s
///   match   the next `merge` kept tokens by position, fewer at the end
///   merge   v ← v + v_i/n for each of the n, with probability min(1, s_i / mean of their s); keys
///           and log-mass are untouched
/// A value is added to none where one of the sums is beyond the storage's numbers (ours).
/// Values evicted together are added as they were. A prompt only evicts unless `merge_prompt`:
/// merging nine tokens of ten into the tenth drowns it.
struct cam {
  float recent = 0.5F;  ///< share of the budget for the latest tokens
  index_t sinks = 4;
  index_t merge = 32;  ///< tokens that a value is added to
  std::uint64_t seed = 0;
  bool merge_prompt = false;

  static constexpr std::string_view name() { return "cam"; }
  static void parameters(auto& p, auto f) {
    f("recent", p.recent), f("sinks", p.sinks), f("merge", p.merge), f("seed", p.seed),
        f("merge_prompt", p.merge_prompt);
  }
  static constexpr std::array<slot_stat, 1> slot_stats() { return {}; }
  static constexpr std::size_t memory(index_t, index_t, index_t) { return 1; }  // 1: decoding
  index_t min_budget() const { return search::least_target(1, recent, sinks); }
  static constexpr observation_needs needs() { return {.probabilities = true}; }
  void validate() const {
    search::expect_share(name(), "recent", recent);
    search::expect_count(name(), "sinks", sinks, 0);
    search::expect_count(name(), "tokens to merge into", merge, 1);
  }

  void observe(const kv_head auto&, head_state& state, const observation& observed) const {
    score::accumulate(state.column(0), observed.attention);
    state.memory()[0] = 1;
  }
  template <class T>
  void observe(const kv_head auto& head, head_state& state, const query_view<T>& queries) const {
    score::accumulate(state.column(0), head, queries);
    state.memory()[0] = 0;
  }

  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    const auto score = state.column(0);
    evict(head, target, protected_slots(head, sinks, share_of(recent, target)),
          search::column_score(score), work, out);
    if (state.memory()[0] == 0 && !merge_prompt) {
      return;
    }
    const index_t rows = out.rows(), dim = head.value_dim();
    const std::size_t size = as_size(rows) * as_size(dim);
    auto delta = detail::arena(work.numbers, size).rows(rows, dim);
    bool given = false;        // nothing is written, nor passed on, before the first value
    auto& order = work.order;  // rows by position
    order.clear();
    for (index_t r = 0; r < rows; ++r) {
      order.push_back(r);
    }
    const auto position = [&](index_t r) { return head.position(out.anchor(r)); };
    detail::sort_slots(
        order, [&](index_t r) { return detail::ascending(position(r)); }, work.keyed);
    for (index_t s = 0; s < head.length(); ++s) {
      if (work.marks[s] != 0) {
        continue;
      }
      const auto first = std::ranges::upper_bound(order, head.position(s), {}, position);
      const auto last = first + std::min(std::ptrdiff_t{merge}, order.end() - first);
      const auto n = static_cast<float>(last - first);
      double theirs = 0;
      for (auto r = first; r != last; ++r) {
        theirs += double{score[as_size(out.anchor(*r))]};
      }
      if (!gives(head.position(s), score[as_size(s)], theirs, last - first) ||
          !std::all_of(first, last, [&](index_t r) {
            return fits(head, out.anchor(r), given ? &delta(r, 0) : nullptr, s, last - first);
          })) {
        continue;
      }
      if (!given) {
        delta.setZero(), given = true;
      }
      constexpr index_t chunk = 64;  // of a row, on the stack
      float value[chunk];
      for (index_t begin = 0; begin < dim; begin += chunk) {
        const index_t width = std::min(chunk, dim - begin);
        to_floats(head.value(s).from(begin), width, value);
        for (auto r = first; r != last; ++r) {
          for (index_t i = 0; i < width; ++i) {
            delta(*r, begin + i) += value[i] / n;
          }
        }
      }
    }
    if (given) {
      out.correct_values({delta.data(), size}, dim);
    }
  }

  slot_removal choose_victim(const kv_head auto& head, const head_state& state, index_t target,
                             const fused_similarity&) const {
    const auto score = state.column(0);
    slot_removal out;
    out.removed =
        search::lowest_scored(head.length(), protected_slots(head, sinks, share_of(recent, target)),
                              search::column_score(score));
    if (state.memory()[0] == 0 && !merge_prompt) {
      return out;
    }
    const index_t own = head.position(out.removed), last = share_until_position(head, own);
    double theirs = 0;
    index_t share_count = 0;
    for (index_t s = 0; s < head.length(); ++s) {
      if (head.position(s) > own && head.position(s) <= last) {
        theirs += double{score[as_size(s)]};
        ++share_count;
      }
    }
    if (gives(own, score[as_size(out.removed)], theirs, share_count) &&
        takes_share(head, out.removed, last, share_count)) {
      out.share_count = share_count, out.share_until_position = last;
    }
    return out;
  }

 private:
  /// Is the value of slot `to`, what is added to it so far, `delta [dim]` or none, and an `n`-th of
  /// that of slot `s` a value that their storage holds?
  static bool fits(const kv_head auto& head, index_t to, const float* delta, index_t s,
                   std::ptrdiff_t n) {
    const merge_source both[] = {{to}, {s, 0, 1 / static_cast<float>(n)}};
    const auto added =
        delta == nullptr ? std::span<const float>() : std::span(delta, as_size(head.value_dim()));
    return merge::fits(head.type().values, head.value_dim(), both, &merge_source::value_weight,
                       added, [&](index_t r) { return head.value(r); });
  }
  /// Do all slots behind slot `s`, up to position `last`, hold their share?
  static bool takes_share(const kv_head auto& head, index_t s, index_t last, index_t share_count) {
    for (index_t r = 0; r < head.length(); ++r) {
      if (head.position(r) > head.position(s) && head.position(r) <= last &&
          !fits(head, r, nullptr, s, share_count)) {
        return false;
      }
    }
    return true;
  }
  /// Is the value of the token at `position` added to `n` of scores that sum to `theirs`? own /
  /// mean is at most 1, and 1 where the mean is 0: chance is below 1, so need not be clamped.
  bool gives(index_t position, float own, double theirs, std::ptrdiff_t n) const {
    return own > 0 &&
           double{detail::unit_random(seed, position)} * theirs / static_cast<double>(n) <
               double{own};
  }
  /// The position up to which there are `merge` slots behind `position`; the newest's, if there are
  /// fewer.
  index_t share_until_position(const kv_head auto& head, index_t position) const {
    const auto up_to = [&](index_t last) {
      index_t count = 0;
      for (index_t s = 0; s < head.length(); ++s) {
        count += static_cast<index_t>(head.position(s) > position) &
                 static_cast<index_t>(head.position(s) <= last);
      }
      return count;
    };
    index_t low = position, high = newest_position(head);
    if (up_to(high) <= merge) {
      return high;
    }
    while (high - low > 1) {  // more than `merge` up to `high`, at most so many up to `low`
      const index_t middle = low + (high - low) / 2;
      (up_to(middle) > merge ? high : low) = middle;
    }
    return low;
  }
};

}  // namespace kvmeld::inline v0
