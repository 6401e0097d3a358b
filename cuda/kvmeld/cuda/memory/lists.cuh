// SPDX-License-Identifier: MIT
/// Lists of slots on the device: what plans that merge are made from.
#pragma once

#include "kvmeld/cuda/memory/view.cuh"

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
