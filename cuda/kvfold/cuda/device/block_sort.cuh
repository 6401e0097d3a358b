/// Slots in an order of their own, found by a block.
#pragma once

#include "kvfold/cuda/device/block_collectives.cuh"

namespace kvfold::cuda::detail {

template <index_t Threads>
struct sort_memory {
  static constexpr index_t bins = 256;
  shared_array<index_t, Threads / 32 * bins> cursor;  // of each warp's share
  of_warps<index_t, Threads> number;
  prefix_memory<Threads> prefix;
};

/// Sorts `slots [n]` by `key(slot)`, 0 to `most`, equal ones in the order they came in; `spare [n]`
/// is scratch. Returns the one of the two that holds them then. By radix from the lowest 8 bits on:
/// every warp counts its share, then places it behind what the warps below it place. Slots that are
/// in order are noticed by one pass.
template <index_t Threads, class Key>
KVFOLD_DEVICE index_t* block_sort(sort_memory<Threads>& shared, index_t* slots, index_t* spare,
                                  index_t n, unsigned most, Key key) {
  constexpr index_t warps = Threads / 32, bins = sort_memory<Threads>::bins;
  static_assert(Threads >= bins);
  sync_block();  // the list is written
  index_t falls = 0;
  for (index_t i = thread_index(); i + 1 < n; i += Threads) {
    falls = key(slots[i]) > key(slots[i + 1]) ? 1 : falls;
  }
  if (block_max(shared.number, falls) == 0) {
    return slots;
  }
  const index_t share = ((n + warps - 1) / warps + 31) / 32 * 32;
  const index_t begin = warp() * share, end = begin + share < n ? begin + share : n;
  for (index_t shift = 0; shift < 32 && most >> shift != 0; shift += 8) {
    const auto digit = [&](index_t i) {
      return i < end ? static_cast<index_t>(key(slots[i]) >> shift & 255U) : bins;
    };
    for (index_t i = thread_index(); i < warps * bins; i += Threads) {
      shared.cursor[i] = 0;
    }
    sync_block();
    for (index_t i0 = begin; i0 < end; i0 += 32) {
      const index_t d = digit(i0 + lane());
      const unsigned same = equal_lanes(d);
      if (d < bins && lane() == lowest_lane(same)) {
        add_shared(shared.cursor, warp() * bins + d, count_lanes(same));
      }
    }
    sync_block();
    index_t sum = 0;
    for (index_t w = 0; w < warps && thread_index() < bins; ++w) {
      sum += shared.cursor[w * bins + thread_index()];
    }
    index_t at = block_prefix(shared.prefix, shift / 8 & 1, sum, 0).a;
    for (index_t w = 0; w < warps && thread_index() < bins; ++w) {
      const index_t count = shared.cursor[w * bins + thread_index()];
      shared.cursor[w * bins + thread_index()] = at;
      at += count;
    }
    sync_block();
    for (index_t i0 = begin; i0 < end; i0 += 32) {
      const index_t d = digit(i0 + lane());
      const unsigned same = equal_lanes(d), below = same & ((1U << lane()) - 1U);
      index_t place = 0;
      if (d < bins && lane() == lowest_lane(same)) {
        place = add_shared(shared.cursor, warp() * bins + d, count_lanes(same));
      }
      place = shuffle(place, lowest_lane(same)) + count_lanes(below);
      if (d < bins) {
        spare[place] = slots[i0 + lane()];
      }
    }
    sync_block();
    index_t* const sorted = spare;
    spare = slots, slots = sorted;
  }
  return slots;
}

/// The mean of `x` over the `kernel` neighbours of place `i` in `order [n]`: at the borders over
/// those that are there, or, with `count_border`, as if zeros stood outside. One number of
/// `kvfold::average_pool`.
KVFOLD_DEVICE inline float pooled(const float* x, const index_t* order, index_t n, index_t i,
                                  index_t kernel, bool count_border = false) {
  const index_t half = kernel / 2, begin = i < half ? 0 : i - half;
  const index_t end = i + half + 1 < n ? i + half + 1 : n;
  float sum = 0;
  for (index_t j = begin; j < end; ++j) {
    sum += x[order[j]];
  }
  return sum / static_cast<float>(count_border ? kernel : end - begin);
}

}  // namespace kvfold::cuda::detail
