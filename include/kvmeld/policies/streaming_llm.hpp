// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>  // std::min
#include <limits>     // std::numeric_limits

#include "kvmeld/memory/fields.hpp"
#include "kvmeld/memory/rotation.hpp"
#include "kvmeld/policies/policy.hpp"

namespace kvmeld::inline v0 {

/// StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): attention sinks and a window.
///   score   none
///   select  the first S tokens and the last B − S           section 3.2
///   match   none: the others are evicted
/// `positions`: `original` leaves every key at the rotation of its own position. `cache_index` is
/// the paper's: positions within the cache. RoPE knows distances only, and all kept tokens but the
/// sinks are consecutive, so rotating just the S sinks forward gives the paper's logits for O(S
/// · dim) a step.
struct streaming_llm {
  /// Which positions keys are rotated to.
  enum class position_mode { original, cache_index };

  index_t sinks = 4;
  position_mode positions = position_mode::original;

  static constexpr std::string_view name() { return "streaming_llm"; }
  /// Moved sinks rotate their keys, and must not rotate values. What is sealed does not move.
  attention_support supports() const {
    const bool stays = positions == position_mode::original;
    return {.one_memory = stays, .seals = stays};
  }
  static constexpr std::tuple options{
      option("sinks", &streaming_llm::sinks, 0, any_count, "first tokens, never evicted"),
      option("positions", &streaming_llm::positions, 0, 1, "0 original, 1 within the cache")};

  index_t min_budget() const { return sinks + 1; }
  /// Under `cache_index` sinks move in position, and stay before all others.
  protection protects(const kv_head auto& head, index_t) const {
    return {.sinks = positions == position_mode::original || head.length() <= sinks
                         ? sinks
                         : first_of_window(head)};
  }
  index_t score(const kv_head auto& head, const head_state&, index_t slot) const {
    return head.position(slot);
  }

  /// `cache_index` remembers the sinks' keys as they were appended, so that rounding never
  /// accumulates.
  std::size_t memory(index_t dim, index_t, index_t) const {
    return positions == position_mode::original ? 0 : as_size(sinks) * as_size(sink{dim}.all.size);
  }

  /// Moves the sinks right before the window. They are the slots of the lowest positions, wherever
  /// they lie. Where another policy left gaps in the window, these stay until it has moved on.
  void after_compress(const kv_head auto& head, head_state& state, index_t) const {
    if (positions == position_mode::original || head.length() <= sinks) {
      return;
    }
    const index_t first = first_of_window(head);
    // Downwards: none is moved onto another.
    for (index_t r = sinks - 1, above = first; r >= 0; --r) {
      const index_t s = highest_below(head, above);
      above = head.position(s);
      move(head, s, first - sinks + r, state.memory().data() + r * sink{head.dim()}.all.size);
    }
  }

 private:
  /// What is remembered of a sink: where it was, where it is (positions and one), its key.
  struct sink {
    index_t dim;
    memory_layout all = {};
    integer_field was_at = all.i32(), is_at = all.i32();
    row_field key = all.f32(dim);
  };

  /// Moves slot `s` in position; `own`: the sink's memory.
  void move(const kv_head auto& head, index_t s, index_t position, float* own) const {
    const index_t dim = head.dim();
    const sink of{dim};
    if (position == head.position(s)) {
      return;
    }
    if (of.is_at.get(own) != head.position(s) + 1) {  // a slot that was not moved yet
      to_floats(head.key(s), dim, of.key.row(own));
      of.was_at.set(own, head.position(s) + 1);
    }
    float turned[longest_row];
    std::copy_n(of.key.row(own), dim, turned);
    head.spec().rope.rotate(row<float>{turned}, dim, position + 1 - of.was_at.get(own));
    head.renumber(s, position);
    detail::store_row(turned, head.key(s), dim);
    of.is_at.set(own, position + 1);
  }
  /// The lowest position that is no sink's.
  index_t first_of_window(const kv_head auto& head) const {
    index_t lowest = -1;
    for (index_t r = 0; r <= sinks; ++r) {
      index_t next = std::numeric_limits<index_t>::max();
      for (index_t s = 0; s < head.length(); ++s) {
        next = head.position(s) > lowest ? std::min(next, head.position(s)) : next;
      }
      lowest = next;
    }
    return lowest;
  }
  static index_t highest_below(const kv_head auto& head, index_t position) {
    return search::lowest_scored(
        head.length(), [&](index_t s) { return head.position(s) >= position; },
        [&](index_t s) { return -head.position(s); });
  }
};

}  // namespace kvmeld::inline v0
