// SPDX-License-Identifier: MIT
/// Slots in an order of their own, found by a block.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"

namespace kvmeld::cuda::detail {

template <index_t Threads>
struct sort_memory {
  static constexpr index_t bins = 256;
  shared_array<index_t, Threads / 32 * bins> cursor;  // of each warp's share
  of_warps<index_t, Threads> number;
  prefix_memory<Threads> prefix;
};

/// Slots of a warp's share, `own` a lane, and their keys: all in flight at once.
struct slots_to_sort {
  static constexpr index_t own = 8, at_once = 32 * own;
  index_t slot[own];  // -1: none
  unsigned key[own];

  /// Slots from place `begin` on.
  template <class Key>
  KVMELD_DEVICE void read(const index_t* slots, index_t begin, index_t end, Key key_of) {
    unrolled<own>([&](index_t u) {
      const index_t i = begin + 32 * u + lane();
      slot[u] = i < end ? slots[i] : -1;
    });
    unrolled<own>([&](index_t u) { key[u] = slot[u] >= 0 ? key_of(slot[u]) : ~0U; });
  }
  /// Is one of the keys larger than the next, of which `behind` comes after the share?
  KVMELD_DEVICE bool falls(index_t begin, index_t end, unsigned behind) const {
    bool is = false;
    unrolled<own>([&](index_t u) {
      const unsigned beside = shuffle(key[u], (lane() + 1) % 32);
      const unsigned after = shuffle(key[u + 1 < own ? u + 1 : u], 0);
      const unsigned next = lane() < 31                                 ? beside
                            : u + 1 < own && begin + 32 * (u + 1) < end ? after
                                                                        : behind;
      is = is || (slot[u] >= 0 && key[u] > next);
    });
    return is;
  }
  /// `use(slot, digit, the lanes that have the same)` of 32 slots after 32; digit −1: no slot.
  template <class Use>
  KVMELD_DEVICE void each_digit(index_t begin, index_t end, index_t shift, Use use) const {
    unrolled<own>([&](index_t u) {
      if (begin + 32 * u < end) {
        const index_t d = slot[u] >= 0 ? static_cast<index_t>(key[u] >> shift & 255U) : -1;
        use(slot[u], d, equal_lanes(d));
      }
    });
  }
};

/// Sorts `slots [n]` by `key(slot)`, 0 to `most`, equal ones in the order they came in; `spare [n]`
/// is scratch. Returns the one of the two that holds them then. By radix from the lowest 8 bits on:
/// every warp counts its share, then places it behind what the warps below it place. Slots that are
/// in order are noticed when they are first read. Up to 8 slots a thread are read once a pass, and
/// stay in registers until they are placed.
template <index_t Threads, class Key>
KVMELD_DEVICE index_t* block_sort(sort_memory<Threads>& shared, index_t* slots, index_t* spare,
                                  index_t n, unsigned most, Key key) {
  constexpr index_t warps = Threads / 32, bins = sort_memory<Threads>::bins;
  constexpr index_t at_once = slots_to_sort::at_once;
  static_assert(Threads >= bins);
  sync_block();  // the list is written
  const index_t share = ((n + warps - 1) / warps + 31) / 32 * 32;
  const index_t begin = warp() * share, end = begin + share < n ? begin + share : n;
  const bool stays = share <= at_once;  // in registers
  slots_to_sort mine;
  bool falls = false;
  KVMELD_ROLLED
  for (index_t i0 = begin; i0 < end; i0 += at_once) {
    const index_t stop = i0 + at_once < end ? i0 + at_once : end;
    const unsigned behind = lane() == 31 && stop < n ? key(slots[stop]) : ~0U;
    mine.read(slots, i0, end, key);
    falls = mine.falls(i0, end, behind) || falls;
  }
  if (block_max(shared.number, falls ? 1 : 0) == 0) {
    return slots;
  }
  KVMELD_ROLLED
  for (index_t shift = 0; shift < 32 && most >> shift != 0; shift += 8) {
    for (index_t b = lane(); b < bins; b += 32) {
      shared.cursor[warp() * bins + b] = 0;
    }
    sync_warp();
    KVMELD_ROLLED
    for (index_t i0 = begin; i0 < end; i0 += at_once) {
      if (shift > 0 || !stays) {
        mine.read(slots, i0, end, key);
      }
      mine.each_digit(i0, end, shift, [&](index_t, index_t d, unsigned same) {
        if (d >= 0 && lane() == lowest_lane(same)) {
          add_shared(shared.cursor, warp() * bins + d, count_lanes(same));
        }
      });
    }
    sync_block();
    index_t count[warps], sum = 0;
    unrolled<warps>([&](index_t w) {
      count[w] = thread_index() < bins ? shared.cursor[w * bins + thread_index()] : 0;
      sum += count[w];
    });
    index_t at = block_prefix(shared.prefix, shift / 8 & 1, sum, 0).a;
    unrolled<warps>([&](index_t w) {
      if (thread_index() < bins) {
        shared.cursor[w * bins + thread_index()] = at;
      }
      at += count[w];
    });
    sync_block();
    KVMELD_ROLLED
    for (index_t i0 = begin; i0 < end; i0 += at_once) {
      if (!stays) {
        mine.read(slots, i0, end, key);
      }
      mine.each_digit(i0, end, shift, [&](index_t slot, index_t d, unsigned same) {
        index_t place = 0;
        if (d >= 0 && lane() == lowest_lane(same)) {
          place = add_shared(shared.cursor, warp() * bins + d, count_lanes(same));
        }
        place = shuffle(place, lowest_lane(same)) + count_lanes(same & ((1U << lane()) - 1U));
        if (d >= 0) {
          spare[place] = slot;
        }
      });
    }
    sync_block();
    index_t* const sorted = spare;
    spare = slots, slots = sorted;
  }
  return slots;
}

/// The mean of `x` over the `kernel` neighbours of place `i` in `order [n]`: at the borders over
/// those that are there, or, with `count_border`, as if zeros stood outside. One number of
/// `kvmeld::average_pool`.
KVMELD_DEVICE inline float pooled(const float* x, const index_t* order, index_t n, index_t i,
                                  index_t kernel, bool count_border = false) {
  const index_t half = kernel / 2, begin = i < half ? 0 : i - half;
  const index_t end = i + half + 1 < n ? i + half + 1 : n;
  float sum = 0;
  for (index_t j = begin; j < end; ++j) {
    sum += x[order[j]];
  }
  return sum / static_cast<float>(count_border ? kernel : end - begin);
}

}  // namespace kvmeld::cuda::detail
