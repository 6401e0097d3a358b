#pragma once

#include <algorithm>  // std::fill_n
#include <cmath>      // std::isfinite
#include <limits>     // std::numeric_limits
#include <string_view>

#include "kvfold/arena.hpp"
#include "kvfold/evict.hpp"
#include "kvfold/match.hpp"
#include "kvfold/policy.hpp"

namespace kvfold {

/// KeyDiff (arXiv 2504.15364): the keys least like all others. Needs no attention.
///   score   s_j = −cos(k_j, mean_i k_i/‖k_i‖) over all slots held, keys as stored
///   select  sinks and the last W tokens (the paper: 0 and 0), then the top of the rest by s
///   match   nowhere: what leaves is gone
/// A zero key adds nothing to the mean and has cosine 0.
struct key_diff {
  index_t sinks = 4;
  index_t window = 0;

  static constexpr std::string_view name() { return "key_diff"; }
  index_t least() const { return sinks + window + 1; }
  void validate() const {
    expect_count(name(), "sinks", sinks, 0);
    expect_count(name(), "tokens in the window", window, 0);
  }

  void plan(const kv_head auto& head, const head_state&, index_t target, merge_plan& out) const {
    auto score =
        arena(out.numbers(), static_cast<std::size_t>(head.length())).column(head.length());
    each_score(head, [&](index_t s, float x) { score[s] = x; });
    evict(head, target, protected_slots(head, sinks, window),
          by({score.data(), static_cast<std::size_t>(head.length())}), out);
  }
  departure leaving(const kv_head auto& head, const head_state&, index_t) const {
    const auto stays = protected_slots(head, sinks, window);
    departure out;
    float lowest = 0;
    each_score(head, [&](index_t s, float x) {
      x = rank(x);
      if ((out.leaving < 0 || x <= lowest) && !stays(s)) {  // as `least_wanted`
        out.leaving = s, lowest = x;
      }
    });
    return out;
  }

 private:
  /// Calls `see(slot, score)` slot by slot. Keys are read twice, tile by tile; nothing is
  /// allocated.
  template <class See>
  static void each_score(const kv_head auto& head, See see) {
    const index_t dim = head.dim();
    float mean[detail::tile_room], norm[detail::tile_most], dot[detail::tile_most];
    const auto or_infinity = [](float x) {  // what is divided by it is 0
      return x > 0 ? x : std::numeric_limits<float>::infinity();
    };
    std::fill_n(mean, dim, 0.0F);
    detail::each_tile_of_keys(head, [&](index_t, const detail::tile& keys) {
      const auto count = static_cast<index_t>(keys.rows());
      detail::row_norms(keys, norm);
      bool all = true;
      for (index_t i = 0; i < count; ++i) {
        all = all && std::isfinite(norm[i]);
        norm[i] = 1 / or_infinity(norm[i]);
      }
      for (index_t i = 0; i < (all ? 1 : count); ++i) {  // 0 · NaN is NaN: such rows are left out
        if (all || norm[i] > 0) {
          const detail::tile rows_from(keys.data() + i * keys.outerStride(), all ? count : 1, dim,
                                       Eigen::OuterStride<>(keys.outerStride()));
          detail::tile_sums(norm + i, 0, 1, rows_from, mean);
        }
      }
    });
    const row<const float> sum{mean};
    const float length = std::sqrt(kvfold::dot(sum, sum, dim));  // its scale changes no cosine
    detail::each_tile_of_keys(head, [&](index_t first, const detail::tile& keys) {
      const auto count = static_cast<index_t>(keys.rows());
      detail::row_dots_and_norms(keys, mean, dot, norm);
      for (index_t i = 0; i < count; ++i) {
        norm[i] = or_infinity(norm[i] * length);
      }
      for (index_t i = 0; i < count; ++i) {
        see(first + i, -(dot[i] / norm[i]));
      }
    });
  }
};

}  // namespace kvfold
