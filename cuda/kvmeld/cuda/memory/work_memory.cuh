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
  index_t* tickets;          // [heads] blocks of a launch that are done
  float* logits;             // [places, capacity, group], or null: they are not observed
  float* max;                // [places, splits, group] of the logits
  float* sum;                // [places, splits, group] Σ exp(ℓ − max)
  float* out;                // [places, splits, group, out_pitch(dim)] Σ exp(ℓ − max) v
  unsigned long long* best;  // [heads, tiles] best candidate of each tile
  index_t splits;
  index_t tiles;

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
    return best + std::ptrdiff_t{h} * tiles;
  }
};

/// Slots of a block in the second launch, at most.
inline constexpr index_t slots_a_tile = 4096;

/// One of `tiles` even shares of a head's `n` slots.
struct slot_tile {
  index_t begin, end;

  KVMELD_DEVICE static slot_tile of(index_t tile, index_t tiles, index_t n) {
    const index_t share = (n + tiles - 1) / tiles;
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
  const auto all = shape.all_heads(), places = static_cast<std::size_t>(shape.active),
             g = static_cast<std::size_t>(shape.group),
             parts = most_parts(shape.active, shape.capacity, p.splits, at_once);
  p.tickets = from.take<index_t>(all);
  p.logits = from.take<float>(places * static_cast<std::size_t>(shape.capacity) * g);
  p.max = from.take<float>(parts * g);
  p.sum = from.take<float>(parts * g);
  p.out = from.take<float>(parts * g * static_cast<std::size_t>(p.out_pitch(shape.dim)));
  p.best = from.take<unsigned long long>(all * static_cast<std::size_t>(p.tiles));
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
  }
  return m;
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
  m.plan.allocate(from, rule, shape);
  if constexpr (requires { m.plan.wide; }) {  // with them the plan's memory begins: they stay
    auto again = m.plan.wide;
    again.allocate(measure, shape, true);
  }
  m.sums = measure.take<float>(slots), m.last = measure.take<float>(slots);
  m.order = measure.take<index_t>(slots), m.spare = measure.take<index_t>(slots);
  m.measure.allocate(measure, shape.heads, shape.group, shape.queries, shape.capacity);
  from.reserve(measure.used());
  return m;
}

}  // namespace detail

}  // namespace kvmeld::cuda
