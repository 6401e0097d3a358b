// SPDX-License-Identifier: MIT
/// The k-th highest of a head's numbers, found by a block.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"

namespace kvmeld::cuda::detail {

/// The `wanted`-th highest: those above it, and of its equals as many as are wanted then.
struct selected_order {
  unsigned least = ~0U;
  index_t equals = 0;
};

struct radix_select_memory {
  static constexpr index_t bins = 256;
  shared_array<index_t, bins> histogram;
  shared_array<index_t, 2> found;  // a digit, and how many lie above it
};

/// What a kernel has that counts slots, and selects some by rank.
template <index_t Threads>
struct selection_memory {
  radix_select_memory radix;
  of_warps<index_t, Threads> number;
  prefix_memory<Threads> prefix;
};

/// By radix, four passes over 8 bits of every number (a histogram of integers in shared memory, so
/// no order of threads can show).
template <index_t Threads>
struct block_radix_select {
  static constexpr index_t bins = radix_select_memory::bins;
  static constexpr index_t own = 8;  // numbers of a thread at once

  /// Of the numbers `order(s)` of slots `0 .. n−1` that `counts(s)`, at least `wanted`; 0: none is.
  template <class Counts, class Order>
  KVMELD_DEVICE static selected_order highest(radix_select_memory& shared, index_t n,
                                              index_t wanted, Counts counts, Order order) {
    if (wanted <= 0) {
      return {};
    }
    selected_order x{0, wanted};
    numbers mine;
    KVMELD_ROLLED
    for (index_t shift = 24; shift >= 0; shift -= 8) {
      digit(shared, n, shift, counts, order, mine, x);
    }
    return x;
  }

  /// `use(s)` for every slot that `counts(s)` and is not among the `wanted` highest, ties to the
  /// lower slot. `use` may change what `counts` says of its own slot.
  template <class Counts, class Order, class Use>
  KVMELD_DEVICE static void each_but_highest(radix_select_memory& shared,
                                             prefix_memory<Threads>& prefix, index_t n,
                                             index_t wanted, Counts counts, Order order, Use use) {
    split<false>(
        shared, prefix, n, wanted, [&](index_t s) { return counts(s) ? s : -1; }, order,
        [&](index_t s, bool is, index_t, index_t) {
          if (!is) {
            use(s);
          }
        });
  }

  /// `use(slot, is, before, e)` for place `e` of a list of `n` slots: is it among the `wanted`
  /// highest of `order(e)`, ties to the lower place, and how many of these lie before it? What is
  /// `used` may be written to the list at or below `e`.
  template <class Order, class Use>
  KVMELD_DEVICE static void divide(radix_select_memory& shared, prefix_memory<Threads>& prefix,
                                   const index_t* list, index_t n, index_t wanted, Order order,
                                   Use use) {
    split<true>(
        shared, prefix, n, wanted < n ? wanted : n, [list](index_t e) { return list[e]; }, order,
        use);
  }

 private:
  /// ... of the slots `slot_of(e)`; −1: it does not count. Or `All` do.
  template <bool All, class SlotOf, class Order, class Use>
  KVMELD_DEVICE static void split(radix_select_memory& shared, prefix_memory<Threads>& prefix,
                                  index_t n, index_t wanted, SlotOf slot_of, Order order, Use use) {
    const selected_order least = highest(
        shared, n, wanted, [&](index_t e) { return All || slot_of(e) >= 0; }, order);
    index_t higher_below = 0, equal_below = 0;
    for (index_t base = 0, turn = 0; base < n; base += Threads * own, turn ^= 1) {
      const index_t first = base + warp() * 32 * own + lane();
      index_t slot[own];
      marked_places<own> higher, equal;
      unrolled<own>([&](index_t i) {
        const index_t e = first + 32 * i;
        slot[i] = e < n ? slot_of(e) : -1;
        const bool is = All ? e < n : slot[i] >= 0;
        const unsigned x = is ? order(e) : 0;
        higher.mark(i, is && x > least.least), equal.mark(i, is && x == least.least);
      });
      const bool last = lane() == 31;
      const block_prefixes before =
          block_prefix(prefix, turn, last ? higher.count : 0, last ? equal.count : 0);
      index_t higher_at = higher_below + before.a, equal_at = equal_below + before.b;
      unrolled<own>([&](index_t i) {
        const index_t equals = equal_at + equal.below(i);
        const bool among = equals < least.equals;
        const bool is = (higher.lanes[i] >> lane() & 1U) != 0 ||
                        ((equal.lanes[i] >> lane() & 1U) != 0 && among);
        if (slot[i] >= 0) {
          use(slot[i], is, higher_at + higher.below(i) + (among ? equals : least.equals),
              first + 32 * i);
        }
        higher_at += count_lanes(higher.lanes[i]), equal_at += count_lanes(equal.lanes[i]);
      });
      higher_below += before.all_a, equal_below += before.all_b;
    }
  }

  /// A thread's numbers of a stretch of slots, read side by side. Where one stretch is all there
  /// is, they are read once.
  struct numbers {
    unsigned number[own];
    unsigned counted;  // a bit each

    template <class Counts, class Order>
    KVMELD_DEVICE void read(index_t base, index_t n, Counts counts, Order order) {
      counted = 0;
      unrolled<own>([&](index_t i) {
        const index_t s = base + i * Threads + thread_index();
        const bool is = s < n && counts(s);
        number[i] = is ? order(s) : 0;
        counted |= is ? 1U << i : 0U;
      });
    }
  };

  /// Adds the next digit; `equals` of those that share all digits so far are wanted.
  template <class Counts, class Order>
  KVMELD_DEVICE static void digit(radix_select_memory& shared, index_t n, index_t shift,
                                  Counts counts, Order order, numbers& mine, selected_order& x) {
    for (index_t b = thread_index(); b < bins; b += Threads) {
      shared.histogram[b] = 0;
    }
    sync_block();
    KVMELD_ROLLED
    for (index_t base = 0; base < n; base += Threads * own) {
      if (shift == 24 || n > Threads * own) {
        mine.read(base, n, counts, order);
      }
      unrolled<own>([&](index_t i) {
        if (base + i * Threads < n) {
          const unsigned number = mine.number[i];
          const bool is = (mine.counted >> i & 1U) != 0 &&
                          (shift == 24 || number >> (shift + 8) == x.least >> (shift + 8));
          count(shared, is, static_cast<index_t>(number >> shift & 255U));
        }
      });
    }
    sync_block();
    if (warp() == 0) {  // lane l: 8 bins, from the highest on
      constexpr index_t of_lane = bins / 32;
      index_t number[of_lane], sum = 0;
      unrolled<of_lane>([&](index_t i) {
        sum += number[i] = shared.histogram[bins - 1 - (lane() * of_lane + i)];
      });
      index_t above = warp_prefix(sum);
      unrolled<of_lane>([&](index_t i) {
        if (above < x.equals && above + number[i] >= x.equals) {
          shared.found[0] = bins - 1 - (lane() * of_lane + i);
          shared.found[1] = above;
        }
        above += number[i];
      });
    }
    sync_block();
    x.least |= static_cast<unsigned>(shared.found[0]) << shift;
    x.equals -= shared.found[1];
    sync_block();
  }

  /// Scores crowd in a few bins, of which lanes that meet there would wait for each other: the two
  /// bins of a warp's first lanes are counted at once.
  KVMELD_DEVICE static void count(radix_select_memory& shared, bool counts, index_t bin) {
    unsigned left = ballot(counts);
    for (index_t round = 0; round < 2 && left != 0; ++round) {
      const index_t first = lowest_lane(left);
      const index_t its = shuffle(bin, first);
      const unsigned same = ballot(counts && bin == its) & left;
      if (lane() == first) {
        add_shared(shared.histogram, its, count_lanes(same));
      }
      left &= ~same;
    }
    if ((left >> lane() & 1U) != 0) {
      add_shared(shared.histogram, bin, 1);
    }
  }
};

}  // namespace kvmeld::cuda::detail
