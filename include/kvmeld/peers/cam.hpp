// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::copy, std::ranges::fill

#include "kvmeld/detail/arithmetic.hpp"
#include "kvmeld/detail/product.hpp"
#include "kvmeld/memory/convert.hpp"
#include "kvmeld/merge/merge_rows.hpp"
#include "kvmeld/policies/policy.hpp"

namespace kvmeld::inline v0 {

/// CaM (Zhang et al., ICML 2024, "Cache merging for memory-efficient LLMs inference"): the window
/// of StreamingLLM, but by chance the value of a token that leaves is added to those after it.
///   score   s_j = Σ_g a_gj     attention of the present step alone
///   select  the first S tokens and the last B − S
///   match   the next `merge` kept tokens by position, fewer in a shorter window
///   merge   v ← v + v_i/n for each of the n, with probability min(1, s_i / mean of s over the
///           window); keys and log-mass are untouched
/// As the authors' code for HELM has it, which is also why a prompt only evicts. A value is added
/// to none where one of the sums is beyond the storage's numbers (ours). Values that leave together
/// are added as they were.
struct cam {
  index_t sinks = 4;
  index_t merge = 32;
  std::uint64_t seed = 0;

  static constexpr std::string_view name() { return "cam"; }
  static constexpr std::tuple options{
      option("sinks", &cam::sinks, 0, any_count, "first tokens, never evicted"),
      option("merge", &cam::merge, 1, any_count, "tokens that a value is added to"),
      option("seed", &cam::seed, 0, any_seed, "of the chance")};
  static constexpr column attention{0, "attention"};
  static constexpr std::array columns{attention};
  protection protects(const kv_head auto&, index_t) const { return {.sinks = sinks}; }
  static constexpr observation_needs needs() { return {.probabilities = true}; }
  static constexpr kvmeld::prompt_use prompt_use() { return {.observes = true, .latest = 1}; }

  void observe(const kv_head auto&, head_state& state, const observation& observed) const {
    std::copy(observed.attention.begin(), observed.attention.end(),
              state.column(attention).begin());
  }
  /// What has no attention gives nothing away.
  void observe(const kv_head auto&, head_state& state, const query_view<float>&) const {
    std::ranges::fill(state.column(attention), 0.0F);
  }

  void plan(const kv_head auto& head, const head_state& state, index_t target, slot_scratch& work,
            merge_plan& out) const {
    const auto position = [&](index_t s) { return head.position(s); };
    evict(head, target, protected_slots(head, sinks, 0), position, work, out);
    index_t newest = -1;  // of those that leave
    for (index_t s = 0; s < head.length(); ++s) {
      newest = work.marks[s] != 0 ? newest : std::max(newest, position(s));
    }
    const window behind = window_behind(head, state, newest);
    const index_t rows = out.rows(), dim = head.value_dim();
    const std::size_t size = as_size(rows, dim);
    detail::arena parts(work.numbers, size + as_size(dim));
    const std::span<float> sum{parts.rows(1, dim).data(), as_size(dim)};
    std::span<float> given;  // `sum`, once there is a value
    recipients to{newest};
    float value[detail::row_floats];
    for (index_t s = 0; s < head.length(); ++s) {
      if (work.marks[s] != 0 || !gives(position(s), state.column(attention)[as_size(s)], behind)) {
        continue;
      }
      to = to.count > 0 ? to : recipients_behind(head, newest);
      if (!takes(head, s, to, given)) {
        continue;
      }
      if (given.empty()) {
        given = sum;
        std::ranges::fill(given, 0.0F);
      }
      to_floats(head.value(s), dim, value);
      for (std::size_t i = 0; i < sum.size(); ++i) {
        sum[i] += value[i] / static_cast<float>(to.count);
      }
    }
    if (!given.empty()) {
      auto delta = parts.rows(rows, dim);
      for (index_t r = 0; r < rows; ++r) {
        std::ranges::transform(given, delta.row(r).data(),
                               [&](float x) { return to.has(position(out.anchor(r))) ? x : 0.0F; });
      }
      out.correct_values({delta.data(), size}, dim);
    }
  }

 private:
  /// What a position's followers get of the step's attention.
  struct window {
    double attention = 0;
    index_t slots = 0;
  };
  static window window_behind(const kv_head auto& head, const head_state& state, index_t position) {
    window all;
    for (index_t s = 0; s < head.length(); ++s) {
      if (head.position(s) > position) {
        all.attention += double{state.column(attention)[as_size(s)]};
        ++all.slots;
      }
    }
    return all;
  }

  /// The slots that take a value: `count`, after position `leaves` and up to `last`.
  struct recipients {
    index_t leaves, last = -1, count = 0;

    bool has(index_t position) const { return position > leaves && position <= last; }
  };
  /// The next `merge` after a position; all, if there are fewer.
  recipients recipients_behind(const kv_head auto& head, index_t position) const {
    const auto up_to = [&](index_t last) {
      index_t count = 0;
      for (index_t s = 0; s < head.length(); ++s) {
        count += static_cast<index_t>(head.position(s) > position) &
                 static_cast<index_t>(head.position(s) <= last);
      }
      return recipients{position, last, count};
    };
    index_t low = position, high = newest_position(head);
    if (const recipients all = up_to(high); all.count <= merge) {
      return all;
    }
    while (high - low > 1) {  // more than `merge` up to `high`, at most so many up to `low`
      const index_t middle = low + (high - low) / 2;
      (up_to(middle).count > merge ? high : low) = middle;
    }
    return up_to(low);
  }

  /// Does a token's value go to those after it? own / mean is at most 1, and 1 where the mean is
  /// 0: chance is below 1, so need not be clamped.
  bool gives(index_t position, float own, const window& behind) const {
    return own > 0 && double{detail::unit_random(seed, position)} * behind.attention /
                              static_cast<double>(behind.slots) <
                          double{own};
  }
  /// Do all recipients hold their share of the value of slot `s`, after `added [dim]` or nothing?
  static bool takes(const kv_head auto& head, index_t s, const recipients& to,
                    std::span<const float> added) {
    for (index_t r = 0; r < head.length(); ++r) {
      const merge_source both[] = {{r}, {s, 0, 1 / static_cast<float>(to.count)}};
      if (to.has(head.position(r)) &&
          !merge::fits(head.value(r).type, head.value_dim(), both, &merge_source::value_weight,
                       added, [&](index_t i) { return head.value(i); })) {
        return false;
      }
    }
    return to.count > 0;
  }
};

}  // namespace kvmeld::inline v0
