// SPDX-License-Identifier: MIT
/// What plans are made in, allocated from a workspace.
#pragma once

#include <cstddef>  // std::size_t

#include "kvmeld/cuda/memory/view.cuh"
#include "kvmeld/cuda/memory/workspace.cuh"

namespace kvmeld::cuda {

/// Slots of all heads, `[heads, capacity]`, the first `count[h]` of each.
struct slot_lists {
  const index_t* slots = nullptr;
  const index_t* count = nullptr;  ///< [heads]
};

/// What `match` finds, `[heads, capacity]` by place in the list of removed slots.
struct matches {
  index_t* into = nullptr;      ///< a kept slot; −1: none is kept
  float* similarity = nullptr;  ///< 0 where there is none
};

namespace detail {

/// Which slots are kept, which are removed, and into what, while a plan that merges is made.
struct keep_evict_partition {
  static constexpr bool reads = false;  ///< a selection writes it, and waits for nothing
  static constexpr index_t evicted = -1;
  static constexpr index_t fresh = 1 << 30;  ///< set in an anchor's own `into`: it was removed

  index_t* rows;            ///< [heads] of the plan; −1: this head stays as it is
  index_t *kept, *removed;  ///< [heads, capacity] slots; ascending where `select` made them
  index_t *kept_count, *removed_count;  ///< [heads]
  index_t* into;      ///< [heads, capacity] slot ↦ its row's anchor, or `evicted`
  matches nearest;    ///< of removed slots
  float* similarity;  ///< [heads, capacity] the same by slot

  slot_lists kept_list() const { return {kept, kept_count}; }
  slot_lists removed_list() const { return {removed, removed_count}; }

  KVMELD_DEVICE void none(index_t h) const {
    rows[h] = -1, kept_count[h] = 0, removed_count[h] = 0;
  }
  template <class Scalar>
  KVMELD_DEVICE void keep(const cache_view<Scalar>& cache, index_t h, index_t s, index_t i) const {
    kept[cache.slot(h, i)] = s, into[cache.slot(h, s)] = s;
  }
  template <class Scalar>
  KVMELD_DEVICE void evict(const cache_view<Scalar>& cache, index_t h, index_t s, index_t i) const {
    removed[cache.slot(h, i)] = s, into[cache.slot(h, s)] = evicted;
  }
  template <class Scalar>
  KVMELD_DEVICE void end(const cache_view<Scalar>&, index_t h, index_t kept_slots,
                         index_t removed_slots) const {
    rows[h] = 0, kept_count[h] = kept_slots, removed_count[h] = removed_slots;
  }
};

}  // namespace detail

}  // namespace kvmeld::cuda

namespace kvmeld::cuda::detail {

/// What memory is sized by.
struct work_shape {
  index_t heads = 0, capacity = 0, group = 1, dim = 0;
  index_t queries = 0;       ///< reference queries of a prompt, a query head; 0: a step
  index_t target = 0;        ///< slots a head after a prompt; 0: it is observed and not compressed
  index_t before = 0;        ///< queries of the same prompt right before those
  index_t active = 0;        ///< heads that a call runs
  index_t number_bytes = 4;  ///< of what queries and new tokens are in
  index_t stride = 0;        ///< slots of a head in its cache and state, at least the capacity
  bool narrow = false;       ///< are rows narrower than these?

  std::size_t all_heads() const { return static_cast<std::size_t>(heads); }
  std::size_t slots() const { return all_heads() * static_cast<std::size_t>(capacity); }
};

template <class Scalar>
work_shape shape_of(const cache_view<Scalar>& cache, index_t queries = 0, index_t target = 0,
                    index_t before = 0) {
  return {cache.heads,
          cache.capacity,
          cache.group,
          cache.dim,
          queries,
          target,
          before,
          static_cast<index_t>(cache.blocks()),
          static_cast<index_t>(sizeof(row_number<Scalar>)),
          cache.stride(),
          narrow_rows<Scalar>};
}

/// Floats between rows of a scratch matrix: rows begin at multiples of 16 bytes.
inline index_t pitch_of(index_t dim) { return (dim + 3) / 4 * 4; }

/// A plan, and for rules that merge the lists that it is made from.
struct plan_memory {
  plan_view plan;
  keep_evict_partition divided;

  template <class Rule>
  void allocate(workspace_allocator& from, const Rule&, const work_shape& shape) {
    const std::size_t n = shape.all_heads(), slots = shape.slots();
    plan.rows = from.take<index_t>(n);
    plan.begin = from.take<index_t>(slots + n);
    plan.sources = from.take<merge_source>(slots);
    plan.log_mass = from.take<float>(slots);
    if constexpr (Rule::merges) {
      divided.rows = plan.rows;
      divided.kept = from.take<index_t>(slots), divided.removed = from.take<index_t>(slots);
      divided.kept_count = from.take<index_t>(n), divided.removed_count = from.take<index_t>(n);
      divided.into = from.take<index_t>(slots);
      divided.nearest = {from.take<index_t>(slots), from.take<float>(slots)};
      divided.similarity = from.take<float>(slots);  // until then the norms of `match`
    }
  }
};

/// What plans by `Rule` work in: `Rule::plan_memory`, which begins with a `plan_memory`, or that
/// alone.
template <class Rule>
struct plan_memory_of {
  using type = plan_memory;
};
template <class Rule>
requires requires { typename Rule::plan_memory; }
struct plan_memory_of<Rule> {
  using type = typename Rule::plan_memory;
};

}  // namespace kvmeld::cuda::detail
