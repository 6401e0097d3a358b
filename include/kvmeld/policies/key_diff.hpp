// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::fill_n, std::ranges::min_element
#include <bit>        // std::bit_cast
#include <cmath>      // std::isfinite
#include <limits>     // std::numeric_limits

#include "kvmeld/detail/arena.hpp"
#include "kvmeld/policies/policy.hpp"
#include "kvmeld/search/match.hpp"

namespace kvmeld::inline v0 {

/// KeyDiff (arXiv 2504.15364): the keys least like all others. Needs no attention.
///   score   s_j = −cos(k_j, mean_i k_i/‖k_i‖) over all slots held, keys as stored
///   select  sinks and the last W tokens (the paper: 0 and 0), then the top of the rest by s
///   match   none: the others are evicted
/// A zero key adds nothing to the mean and has cosine 0.
struct key_diff {
  index_t sinks = 4;
  index_t window = 0;

  static constexpr std::string_view name() { return "key_diff"; }
  static constexpr attention_support supports{};
  static void parameters(auto& p, auto f) { f("sinks", p.sinks), f("window", p.window); }
  /// The token up to which `predict_victim` was called, as bits; the sum of k/‖k‖ then.
  static constexpr std::size_t memory(index_t dim, index_t, index_t) { return 1 + as_size(dim); }
  index_t min_budget() const { return sinks + window + 1; }
  void validate() const {
    search::expect_count(name(), "sinks", sinks, 0);
    search::expect_count(name(), "tokens in the window", window, 0);
  }

  void plan(const kv_head auto& head, const head_state&, index_t target, slot_scratch& work,
            merge_plan& out) const {
    auto score = detail::arena(work.numbers, as_size(head.length())).column(head.length());
    each_score(head, [&](index_t s, float x) { score[s] = x; });
    evict(head, target, protected_slots(head, sinks, window),
          search::column_score({score.data(), as_size(head.length())}), work, out);
  }

  /// The sum of k/‖k‖ in the last step, less the evicted key, plus the new one: near enough to the
  /// present sum to say which slots may be the lowest. Attention compares it with all keys, and
  /// sums anew.
  void predict_victim(const kv_head auto& head, head_state& state, index_t,
                      fused_similarity& comparison) const {
    const auto sum = sum_of(head, state);
    add_direction(head, head.length() - 1, 1, sum);
    float guess[detail::row_floats];
    std::ranges::copy(sum, guess);
    std::ranges::fill(sum, 0.0F);
    state.memory()[0] = std::bit_cast<float>(head.next_position());
    comparison.request(head, head.length() - 1, std::span(guess, sum.size()), sum);
  }
  slot_removal choose_victim(const kv_head auto& head, const head_state& state, index_t,
                             const fused_similarity& comparison) const {
    const auto is_protected = protected_slots(head, sinks, window);
    slot_removal out;
    float lowest = 0;
    const auto compare = [&](index_t s, float x) {
      x = rank(x);
      if ((out.removed < 0 || x <= lowest) && !is_protected(s)) {  // as `lowest_scored`
        out.removed = s, lowest = x;
      }
    };
    if (!among_few(head, state, comparison, is_protected, compare)) {
      each_score(head, compare);
    }
    return out;
  }
  void update_memory(const kv_head auto& head, head_state& state, const slot_removal& change,
                     slot_scratch&) const {
    if (change.removed != slot_removal::nowhere &&
        state.memory()[0] == std::bit_cast<float>(head.next_position())) {
      add_direction(head, change.removed, -1, sum_of(head, state));
    }
  }

 private:
  /// `[dim]` of keys.
  static std::span<float> sum_of(const kv_head auto& head, head_state& state) {
    return state.memory().subspan(1, as_size(head.dim()));
  }
  /// Calls `see(slot, score)` slot by slot. Keys are read twice, tile by tile; nothing is
  /// allocated.
  template <class See>
  static void each_score(const kv_head auto& head, See see) {
    const index_t dim = head.dim();
    float mean[detail::row_floats], norm[detail::max_tile_slots], dot[detail::max_tile_slots];
    std::fill_n(mean, dim, 0.0F);
    detail::each_tile_of_keys(head, [&](index_t, const detail::tile& keys) {
      score::row_norms(keys, norm);
      score::add_directions(keys, norm, mean);
    });
    const float length = norm_of(mean, dim);  // its scale changes no cosine
    detail::each_tile_of_keys(head, [&](index_t first, const detail::tile& keys) {
      score::row_dots_and_norms(keys, mean, dot, norm);
      for (index_t i = 0; i < keys.rows(); ++i) {
        see(first + i, difference(dot[i], norm[i] * length));
      }
    });
  }
  static float difference(float dot, float norms) {
    return -(dot / (norms > 0 ? norms : std::numeric_limits<float>::infinity()));
  }
  static float norm_of(const float* x, index_t dim) { return norm(row<const float>{x}, dim); }

  /// Calls `see` for those that may have the lowest score by `comparison`, which is
  /// about `guess`. Its cosines differ from those with the sum itself by at most
  /// 2 ‖guess − sum‖/‖sum‖, and by rounding. False: they say too little.
  template <class Protected, class See>
  static bool among_few(const kv_head auto& head, const head_state& state,
                        const fused_similarity& comparison, Protected is_protected, See see) {
    const index_t n = head.length(), dim = head.dim();
    if (!comparison.is_about(n - 1, n)) {
      return false;
    }
    const float* const sum = state.memory().data() + 1;
    const std::vector<float>&guess = comparison.keys().row, &dot = comparison.keys().dot,
          &norm = comparison.keys().norm;
    float row[detail::row_floats];
    for (index_t i = 0; i < dim; ++i) {
      row[i] = guess[as_size(i)] - sum[i];
    }
    const float length = norm_of(sum, dim), guessed = norm_of(guess.data(), dim),
                error = 4 * (norm_of(row, dim) / length + static_cast<float>(dim + 16) * 1.2e-7F);
    const auto about = [&, d = dot.data(), k = norm.data()](index_t s) {
      return difference(d[s], k[s] * guessed);
    };
    const bool broken =
        search::any_slot(0, n, [&](index_t s) { return !(std::abs(about(s)) <= 2); });
    if (broken || !(error < 1)) {  // NaN
      return false;
    }
    const auto few = search::lowest_apart(n, is_protected, about);
    const float lowest = *std::ranges::min_element(few.score);
    const auto may_be = [&](index_t s) { return about(s) <= lowest + error; };
    float exact = 0, own = 0;
    for (index_t s = 0; s < n; ++s) {
      const index_t end = std::min(s + detail::max_tile_slots, n);
      if (s % detail::max_tile_slots == 0 && !search::any_slot(s, end, may_be)) {
        s = end - 1;  // none of these
      } else if (may_be(s) && !is_protected(s)) {
        to_floats(head.key(s), dim, row);
        score::row_dots_and_norms({row, 1, dim, Eigen::OuterStride<>(dim)}, sum, &exact, &own);
        see(s, difference(exact, own * length));
      }
    }
    return true;
  }

  /// `sum += sign · k_s/‖k_s‖`
  static void add_direction(const kv_head auto& head, index_t s, float sign, std::span<float> sum) {
    float key[detail::row_floats];
    to_floats(head.key(s), head.dim(), key);
    const float norm = norm_of(key, head.dim());
    if (norm > 0 && std::isfinite(norm)) {
      for (index_t i = 0; i < head.dim(); ++i) {
        sum[as_size(i)] += sign * key[i] / norm;
      }
    }
  }
};

}  // namespace kvmeld::inline v0
