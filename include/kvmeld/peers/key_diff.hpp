// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::fill_n
#include <limits>     // std::numeric_limits

#include "kvmeld/detail/product.hpp"
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
  static constexpr attention_support supports() { return {}; }
  static constexpr std::tuple options{
      option("sinks", &key_diff::sinks, 0, any_count, "first tokens, never evicted (the paper: 0)"),
      option("window", &key_diff::window, 0, any_count, "latest tokens, never evicted")};
  protection protects(const kv_head auto&, index_t) const {
    return {.sinks = sinks, .recent = window};
  }

  void plan(const kv_head auto& head, const head_state&, index_t target, slot_scratch& work,
            merge_plan& out) const {
    auto score = detail::arena(work.numbers, as_size(head.length())).column(head.length());
    each_score(head, [&](index_t s, float x) { score[s] = x; });
    evict(head, target, protected_slots(head, sinks, window),
          search::column_score({score.data(), as_size(head.length())}), work, out);
  }

 private:
  /// Calls `see(slot, score)` slot by slot. Keys are read twice, tile by tile.
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
};

}  // namespace kvmeld::inline v0
