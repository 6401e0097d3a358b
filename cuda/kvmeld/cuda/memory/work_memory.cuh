// SPDX-License-Identifier: MIT
/// What calls work in, allocated from one workspace: what one phase wrote may be overwritten by
/// the next.
#pragma once

#include <algorithm>  // std::min
#include <cstddef>    // std::size_t
#include <cstdint>    // std::int64_t

#include "kvmeld/cuda/memory/column_memory.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"

namespace kvmeld::cuda {

namespace detail {

inline constexpr index_t most_splits = 128;
/// Of a group so large that `combined_splits` holds the numbers of fewer.
constexpr index_t most_splits_of(index_t group) {
  return group <= group_block ? most_splits : group_block * (most_splits + 2) / group - 2;
}

/// What the first launch writes for the second. What is large is of the heads that a call runs, by
/// place (`[places]`).
struct partial_attention {
  index_t* tickets;           // [heads] blocks of a launch that are done
  float* logits;              // [places, capacity, group], or null: they are not observed
  float* max;                 // [places, splits, group] of the logits
  float* sum;                 // [places, splits, group] Σ exp(ℓ − max)
  float* out;                 // [places, splits, group, out_pitch(dim)] Σ exp(ℓ − max) v
  unsigned long long* best;   // [heads, near_tiles] best candidate of each tile of a launch
  index_t* victims;           // [heads] the slot that a third launch removes; −1: none
  unsigned long long* found;  // [heads] what attention has found most like it, of ems; 0: nothing
  index_t splits;
  index_t tiles;
  index_t near_tiles;

  /// The state's slots that may be evicted next, `compared_rows` a head; null: none is compared.
  index_t* predicted;
  index_t predicted_stride;
  unsigned long long* nearest;  // [places, splits, compared_rows] the nearest of each
  unsigned long long* lowest;   // [heads, tiles, compared_rows] a tile's first to be evicted next

  /// Whole vectors of four, so that one way of reading them is enough.
  KVMELD_HD static index_t out_pitch(index_t dim) { return (dim + 3) / 4 * 4; }
  template <class Scalar>
  KVMELD_DEVICE float* logits_of(const cache_view<Scalar>& cache, index_t s) const {
    // 2^32 slots would be 16 GiB of logits per query head: an offset is one register.
    const unsigned slot =
        static_cast<unsigned>(place_of_block()) * static_cast<unsigned>(cache.capacity) +
        static_cast<unsigned>(s);
    return logits + static_cast<std::size_t>(slot) * static_cast<std::size_t>(cache.group);
  }
  KVMELD_DEVICE unsigned long long* best_of(index_t h) const {
    return best + std::ptrdiff_t{h} * near_tiles;
  }
  KVMELD_DEVICE unsigned long long* nearest_of(index_t split) const {
    return nearest + (std::ptrdiff_t{place_of_block()} * splits + split) * compared_rows;
  }
  KVMELD_DEVICE unsigned long long* lowest_of(index_t h, index_t tile) const {
    return lowest + (std::ptrdiff_t{h} * tiles + tile) * compared_rows;
  }
  KVMELD_DEVICE index_t* predicted_of(index_t h) const {
    return predicted + std::ptrdiff_t{h} * predicted_stride;
  }
  /// −1 where it is none of the head's `n` slots: predictions may be of any age.
  KVMELD_DEVICE index_t predicted_slot(index_t h, index_t r, index_t n) const {
    const index_t s = predicted_of(h)[r];
    return s < n ? s : -1;
  }
};

/// Slots of a block in the second launch, and in the search for the nearest, at most; there on
/// tensor cores.
inline constexpr index_t slots_a_tile = 4096, slots_a_near_tile = 1024, slots_a_fast_tile = 256;

/// One of `tiles` even shares of a head's `n` slots.
struct slot_tile {
  index_t begin, end;

  /// `begin` is a multiple of `turn`.
  KVMELD_DEVICE static slot_tile of(index_t tile, index_t tiles, index_t n, index_t turn = 1) {
    const index_t share = ((n + tiles - 1) / tiles + turn - 1) / turn * turn;
    const index_t begin = tile * share < n ? tile * share : n;
    return {begin, begin + share < n ? begin + share : n};
  }
};

/// Blocks of attention that the device runs at once: of 70 KiB of shared memory each.
inline index_t attention_blocks() { return blocks_at_once(70 * 1024); }

/// Blocks of 512 slots, which repay their start; fewer slots, down to 128, where heads are few; and
/// no second wave of blocks that is mostly empty. As measured on an H100, which runs 396 at once.
inline index_t splits_of(index_t heads, index_t capacity,
                         std::int64_t at_once = attention_blocks()) {
  const std::int64_t filled = at_once * 2 / 3, n = heads < 1 ? 1 : heads;
  std::int64_t splits = capacity / 512;
  splits = splits * n < filled ? filled / n : splits;
  splits = splits > capacity / 128 ? capacity / 128 : splits;
  splits = splits * n > at_once && splits * n < 2 * at_once ? at_once / n : splits;
  return splits < 1 ? 1 : splits > most_splits ? most_splits : static_cast<index_t>(splits);
}

/// Splits of all heads, and room for those of any fewer heads or slots: one workspace serves them.
inline std::size_t most_parts(index_t heads, index_t capacity, index_t splits,
                              std::int64_t at_once) {
  const std::int64_t of_head = capacity < 128 ? 1 : capacity / 128, n = heads,
                     few = n * of_head < at_once ? n * of_head : at_once;
  return static_cast<std::size_t>(few > n * splits ? few : n * splits);
}

inline void allocate(partial_attention& p, workspace_allocator& from, const work_shape& shape) {
  const index_t at_once = attention_blocks();
  p.splits =
      std::min(splits_of(shape.active, shape.capacity, at_once), most_splits_of(shape.group));
  p.tiles = (shape.capacity + slots_a_tile - 1) / slots_a_tile;
  p.near_tiles = (shape.capacity + slots_a_near_tile - 1) / slots_a_near_tile;
  const auto all = shape.all_heads(), places = static_cast<std::size_t>(shape.active),
             g = static_cast<std::size_t>(shape.group),
             parts = most_parts(shape.active, shape.capacity, p.splits, at_once);
  p.tickets = from.take<index_t>(all);
  p.logits = from.take<float>(places * static_cast<std::size_t>(shape.capacity) * g);
  p.max = from.take<float>(parts * g);
  p.sum = from.take<float>(parts * g);
  p.out = from.take<float>(parts * g * static_cast<std::size_t>(p.out_pitch(shape.dim)));
  const index_t most_tiles = (shape.capacity + slots_a_fast_tile - 1) / slots_a_fast_tile;
  p.best = from.take<unsigned long long>(all * static_cast<std::size_t>(most_tiles));
  p.victims = from.take<index_t>(all);
  p.found = from.take<unsigned long long>(all);
  p.predicted = nullptr;
  const auto lists = [&](std::size_t of) {
    return from.take<unsigned long long>(of * static_cast<std::size_t>(compared_rows));
  };
  p.nearest = lists(parts), p.lowest = lists(all * static_cast<std::size_t>(p.tiles));
}

/// What a step works in: the splits' attention, then plans in the same memory.
template <class Rule>
struct step_memory {
  partial_attention partial;
  typename plan_memory_of<Rule>::type plan;
};

/// `plans`: does the step make plans, and not remove one slot?
template <class Rule>
step_memory<Rule> allocate_step(workspace_allocator& from, const Rule& rule,
                                const work_shape& shape, bool plans) {
  step_memory<Rule> m{};
  workspace_allocator plan = from;
  allocate(m.partial, from, shape);
  if (plans) {
    m.plan.allocate(plan, rule, shape);
    from.reserve(plan.used());
  } else if constexpr (requires { m.plan.allocate_scratch(from, rule, shape); }) {
    m.plan.allocate_scratch(from, rule, shape);  // beside what attention writes
  }
  return m;
}

/// The rule of a step, with what it works in where it needs that.
template <class Rule>
Rule in_memory(Rule rule, const step_memory<Rule>& work) {
  if constexpr (requires { rule.scratch = work.plan.entries; }) {
    rule.scratch = work.plan.entries;
  }
  return rule;
}

/// What `compress` works in: column sums, then plans in the same memory.
template <class Rule>
struct prompt_memory {
  float *sums, *last;  // [heads, capacity]; of the last window
  index_t *order, *spare;
  column_memory measure;
  typename plan_memory_of<Rule>::type plan;
};

template <class Rule>
prompt_memory<Rule> allocate_prompt(workspace_allocator& from, const Rule& rule,
                                    const work_shape& shape) {
  const std::size_t slots = shape.slots();
  workspace_allocator measure = from;
  prompt_memory<Rule> m{};
  m.sums = measure.take<float>(slots), m.last = measure.take<float>(slots);
  m.order = measure.take<index_t>(slots), m.spare = measure.take<index_t>(slots);
  m.measure.allocate(measure, shape.heads, shape.group, shape.queries, shape.capacity);
  m.plan.allocate(from, rule, shape);
  from.reserve(measure.used());
  return m;
}

}  // namespace detail

}  // namespace kvmeld::cuda
