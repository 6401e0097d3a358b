#pragma once

#include <algorithm>  // std::min
#include <string_view>

#include "kvmeld/memory/head_state.hpp"
#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/merge/evict.hpp"
#include "kvmeld/merge/plan.hpp"
#include "kvmeld/merge/slot_removal.hpp"
#include "kvmeld/score/key_comparison.hpp"
#include "kvmeld/search/select.hpp"
#include "kvmeld/search/slot_scratch.hpp"

namespace kvmeld {
inline namespace v0 {

/// StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): attention sinks and a window.
///   score   none
///   select  the first S tokens and the last B − S           section 3.2
///   match   none: the others are evicted
/// `positions`: `original` leaves every key at the rotation of its own position. `cache_index` is
/// the paper's: positions within the cache. RoPE knows distances only, and all kept tokens but the
/// sinks are consecutive, so rope_params just the S sinks forward gives the paper's logits for O(S
/// · dim) a step.
struct streaming_llm {
  enum class position_mode { original, cache_index };

  index_t sinks = 4;
  position_mode positions = position_mode::original;

  static constexpr std::string_view name() { return "streaming_llm"; }
  static void parameters(auto& p, auto f) { f("sinks", p.sinks); }
  index_t min_budget() const { return sinks + 1; }
  void validate() const { search::expect_count(name(), "sinks", sinks, 0); }

  void plan(const kv_head auto& head, const head_state&, index_t target, slot_scratch& work,
            merge_plan& out) const {
    evict(
        head, target, sink_of(head), [&](index_t s) { return head.position(s); }, work, out);
  }

  slot_removal choose_victim(const kv_head auto& head, const head_state&, index_t,
                             const key_comparison&) const {
    return {.removed = search::lowest_scored(head.length(), sink_of(head),
                                             [&](index_t s) { return head.position(s); })};
  }

  /// `cache_index` remembers the sinks' keys as they came, so that rounding never accumulates.
  std::size_t memory(index_t dim, index_t, index_t) const {
    return positions == position_mode::original
               ? 0
               : 1 + static_cast<std::size_t>(sinks) * static_cast<std::size_t>(dim);
  }

  void after_compress(const kv_head auto& head, head_state& state, index_t) const {
    if (positions == position_mode::original) {
      return;
    }
    float& saved = state.memory()[0];
    const index_t newest = newest_position(head);
    for (index_t s = 0; s < std::min(sinks, head.length()); ++s) {
      float* own = state.memory().data() + 1 + std::ptrdiff_t{s} * head.dim();
      const auto key = head.key(s);
      for (; saved <= static_cast<float>(s); ++saved) {  // token s, at position s
        to_floats(key, head.dim(), own);
      }
      const index_t position = newest - head.length() + 1 + s;  // right before the window
      if (position != head.position(s)) {
        float turned[rotation::max_dim];
        std::copy_n(own, head.dim(), turned);
        head.spec().rope.rotate(row<float>{turned}, head.dim(), position - s);
        detail::store_row(turned, key, head.dim());
        head.position(s) = position;
      }
    }
  }

 private:
  /// Sinks move in position under `cache_index`, but never from their slot.
  auto sink_of(const kv_head auto& head) const {
    return [&head, mode = positions, n = sinks](index_t s) {
      return (mode == position_mode::original ? head.position(s) : s) < n;
    };
  }
};

}  // namespace v0
}  // namespace kvmeld
