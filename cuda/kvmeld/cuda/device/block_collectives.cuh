// SPDX-License-Identifier: MIT
/// What the threads of a block find out together, and how blocks share what there is to do.
#pragma once

#include <cstring>      // std::memcpy
#include <type_traits>  // std::is_integral_v

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda {

/// Numbers as integers in the same order; NaN the lowest, zeros equal.
KVMELD_HD inline unsigned ordered(float x) {
  const float y = rank(x) + 0.0F;
  unsigned bits = 0;
  memcpy(&bits, &y, sizeof bits);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}
/// The inverse of `ordered`.
KVMELD_HD inline float number_of(unsigned order) {
  const unsigned bits = (order & 0x80000000U) != 0 ? order ^ 0x80000000U : ~order;
  float x = 0;
  memcpy(&x, &bits, sizeof x);
  return x;
}
KVMELD_HD inline unsigned ordered(index_t x) { return static_cast<unsigned>(x) ^ 0x80000000U; }

/// Keys that order candidates: the first number, then the slot. 0: none.
using candidate = unsigned long long;

/// The best candidate has the lowest order, then the highest slot.
KVMELD_HD inline candidate least_candidate(unsigned order, index_t s) {
  return static_cast<candidate>(~order) << 32 | static_cast<unsigned>(s + 1);
}
/// The best candidate has the highest order, then the lowest slot.
KVMELD_HD inline candidate most_candidate(unsigned order, index_t s) {
  return static_cast<candidate>(order) << 32 | ~static_cast<unsigned>(s);
}
KVMELD_HD inline index_t least_slot(candidate c) {
  return static_cast<index_t>(static_cast<unsigned>(c & 0xffffffffU)) - 1;
}
KVMELD_HD inline index_t most_slot(candidate c) {
  return c == 0 ? -1 : static_cast<index_t>(~static_cast<unsigned>(c & 0xffffffffU));
}

/// Scratch for one number a warp.
template <class T, index_t Threads>
struct of_warps {
  shared_array<T, Threads / 32> x;
};

/// The largest of the block's numbers, in every thread: the same, whatever NaN is among them. Two
/// barriers. Whole numbers of warps are reduced by an instruction, others one after another.
template <class T, index_t Threads>
KVMELD_DEVICE T block_max(of_warps<T, Threads>& shared, T x) {
  constexpr index_t warps = Threads / 32;
  x = reduce_max(x);
  sync_block();  // the last use is over
  if (lane() == 0) {
    shared.x[warp()] = x;
  }
  sync_block();
  if constexpr (std::is_integral_v<T>) {
    return reduce_max<T>(shared.x[lane() % warps]);
  } else {
    T most = shared.x[0];
    for (index_t w = 1; w < warps; ++w) {
      const T y = shared.x[w];
      most = y > most ? y : most;
    }
    return most;
  }
}

/// The sum of the block's numbers, in every thread. Likewise.
template <class T, index_t Threads>
KVMELD_DEVICE T block_sum(of_warps<T, Threads>& shared, T x) {
  constexpr index_t warps = Threads / 32;
  x = reduce_sum(x);
  sync_block();
  if (lane() == 0) {
    shared.x[warp()] = x;
  }
  sync_block();
  if constexpr (std::is_integral_v<T>) {
    const T of_warp = shared.x[lane() % warps];
    return reduce_sum(lane() < warps ? of_warp : T{0});
  } else {
    T sum = shared.x[0];
    for (index_t w = 1; w < warps; ++w) {
      sum += shared.x[w];
    }
    return sum;
  }
}

/// `Σ of(i)` over `0 .. n−1`, each by one thread, in every thread.
template <class T, index_t Threads, class Of>
KVMELD_DEVICE T block_total(of_warps<T, Threads>& shared, index_t n, Of of) {
  T sum = 0;
  for (index_t i = thread_index(); i < n; i += Threads) {
    sum += of(i);
  }
  return block_sum(shared, sum);
}

/// Of two numbers a thread, the sums of the lower threads', and of all.
struct block_prefixes {
  index_t a, b, all_a, all_b;
};

/// Scratch for `block_prefix`.
template <index_t Threads>
struct prefix_memory {
  shared_array<index_t, 2 * 2 * (Threads / 32)> counts;  // a and b, of two turns
};

/// The sum of lower lanes' numbers.
KVMELD_DEVICE inline index_t warp_prefix(index_t x) {
  index_t sum = x;
  for (index_t d = 1; d < 32; d *= 2) {
    const index_t below = shuffle(sum, lane() >= d ? lane() - d : lane());
    sum += lane() >= d ? below : 0;
  }
  return sum - x;
}

/// One barrier: a second call uses the other `turn` (0 or 1).
template <index_t Threads>
KVMELD_DEVICE block_prefixes block_prefix(prefix_memory<Threads>& shared, index_t turn, index_t a,
                                          index_t b) {
  constexpr index_t warps = Threads / 32;
  block_prefixes x{warp_prefix(a), warp_prefix(b), 0, 0};
  if (lane() == 31) {
    shared.counts[(turn * 2 + 0) * warps + warp()] = x.a + a;
    shared.counts[(turn * 2 + 1) * warps + warp()] = x.b + b;
  }
  sync_block();
  unrolled<warps>([&](index_t w) {
    const index_t of_a = shared.counts[turn * 2 * warps + w];
    const index_t of_b = shared.counts[(turn * 2 + 1) * warps + w];
    x.a += w < warp() ? of_a : 0, x.b += w < warp() ? of_b : 0;
    x.all_a += of_a, x.all_b += of_b;
  });
  return x;
}

/// `use(i, size(i), at)` for `i` of `0 .. n−1`, by a thread each: `at` is the sum of the sizes of
/// lower ones. Returns that of all. A barrier for every `Threads` of them, and one at the end.
template <index_t Threads, class Size, class Use>
KVMELD_DEVICE index_t each_placed(prefix_memory<Threads>& shared, index_t n, Size size, Use use) {
  index_t all = 0;
  for (index_t base = 0, turn = 0; base < n; base += Threads, turn ^= 1) {
    const index_t i = base + thread_index(), own = i < n ? size(i) : 0;
    const block_prefixes before = block_prefix(shared, turn, own, 0);
    if (i < n) {
      use(i, own, all + before.a);
    }
    all += before.all_a;
  }
  sync_block();  // what was used is there, and the prefixes may begin anew
  return all;
}

/// Which of a warp's places are marked, place `32 u + l` by lane `l`.
template <index_t Own>
struct marked_places {
  unsigned lanes[Own];
  index_t count = 0;

  KVMELD_DEVICE void mark(index_t u, bool is) {
    lanes[u] = ballot(is);
    count += count_lanes(lanes[u]);
  }
  /// How many of the 32 places `u` lie below this lane's.
  KVMELD_DEVICE index_t below(index_t u) const {
    return count_lanes(lanes[u] & ((1U << lane()) - 1U));
  }
  /// How many lower warps have, and all. As `block_prefix`.
  template <index_t Threads>
  KVMELD_DEVICE block_prefixes of_block(prefix_memory<Threads>& shared, index_t turn) const {
    return block_prefix(shared, turn, lane() == 31 ? count : 0, 0);
  }
};

/// `use(i)` for `0 .. n−1`, each by a warp of one of the blocks along the grid's y.
template <index_t Threads, class Use>
KVMELD_DEVICE void each_by_warp(index_t n, Use use) {
  constexpr index_t warps = Threads / 32;
  const auto block = block_y();
  const auto blocks = grid_y();
  for (index_t i = block * warps + warp(); i < n; i += blocks * warps) {
    use(i);
  }
}

}  // namespace kvmeld::cuda

namespace kvmeld::cuda::detail {

struct best_of_all {
  bool last;     ///< is this the head's last block?
  candidate of;  ///< all tiles; 0: none, or it is not the last
};

/// Writes the block's best to `of_tiles[tile]` and takes a ticket. `*tickets` is 0 before the first
/// block. A head's only block needs neither.
template <index_t Threads>
KVMELD_DEVICE best_of_all best_of_tiles(shared_array<index_t, 1>& ticket,
                                        of_warps<candidate, Threads>& shared, index_t* tickets,
                                        candidate* of_tiles, index_t tile, index_t tiles,
                                        candidate mine) {
  mine = block_max(shared, mine);
  if (tiles == 1) {
    return {true, mine};
  }
  if (thread_index() == 0) {
    of_tiles[tile] = mine;
  }
  thread_fence();
  sync_block();
  if (thread_index() == 0) {
    const index_t done = add_global(tickets, 1);
    ticket[0] = done;
  }
  sync_block();
  thread_fence();
  if (ticket[0] != tiles - 1) {
    return {false, 0};
  }
  candidate best = 0;
  KVMELD_ROLLED
  for (index_t t = thread_index(); t < tiles; t += Threads) {
    best = of_tiles[t] > best ? of_tiles[t] : best;
  }
  return {true, block_max(shared, best)};
}

}  // namespace kvmeld::cuda::detail
