// SPDX-License-Identifier: MIT
/// Which tiles of columns a block of `stream_columns` has to do with.
#pragma once

#include "kvmeld/cuda/device/device.cuh"

namespace kvmeld::cuda::detail {

/// Position of what is absent: a slot that no query sees.
inline constexpr index_t never = 0x7fffffff;

/// A tile in flight, as one register: its number, and what this warp's rows make of it.
struct streamed_tile {
  int packed = -1;

  KVMELD_DEVICE bool none() const { return packed < 0; }
  KVMELD_DEVICE index_t number() const { return packed >> 2; }
  KVMELD_DEVICE bool whole() const { return (packed & 2) != 0; }  ///< nothing to mask
  KVMELD_DEVICE bool seen() const { return (packed & 1) != 0; }   ///< by a row at least
};

/// A walk over tiles of columns, by the bounds of their positions: measured `most` tiles at a time,
/// as the walk comes to them.
template <index_t Warps, index_t Columns>
struct tile_walk {
  static constexpr index_t most = 256, at_once = 4;
  struct shared_memory {
    shared_array<index_t, most> low, high;
  };
  struct bounds {
    index_t low, high;
  };

  index_t tiles, base = -32;
  unsigned bits = 0;  ///< of `base ... base + 32`: tiles to come to

  /// The next tile that the block has to do with; all threads come here together. `column(u, x)`
  /// is a column's position twice, or bounds that say that it has to be masked; `wanted(bounds)` is
  /// the block's answer, `mark(bounds)` the warp's.
  template <class Column, class Wanted, class Mark>
  KVMELD_DEVICE streamed_tile next(shared_memory& shared, Column column, Wanted wanted, Mark mark) {
    while (bits == 0 && base + 32 < tiles) {
      base += 32;
      if (base % most == 0) {
        sync_block();  // all are done with those before
        measure(shared, column);
        sync_block();
      }
      const index_t u = base + lane();
      bits = ballot(u < tiles && wanted(of(shared, u)));
    }
    if (bits == 0) {
      return {};
    }
    const index_t u = base + lowest_lane(bits);
    bits &= bits - 1;
    return {u << 2 | mark(of(shared, u))};
  }

 private:
  KVMELD_DEVICE static bounds of(shared_memory& shared, index_t u) {
    return {shared.low[u % most], shared.high[u % most]};
  }
  /// A warp a tile, four of them at once: what it waits for is memory.
  template <class Column>
  KVMELD_DEVICE void measure(shared_memory& shared, Column column) const {
    const index_t end = base + most < tiles ? base + most : tiles;
    for (index_t u0 = base + at_once * warp(); u0 < end; u0 += at_once * Warps) {
      index_t low[at_once], high[at_once];
      KVMELD_UNROLL
      for (index_t t = 0; t < at_once; ++t) {
        low[t] = never, high[t] = -1;
        KVMELD_UNROLL
        for (index_t x = 0; x < Columns; x += 32) {
          if (u0 + t < end) {
            const bounds own = column(u0 + t, x + lane());
            low[t] = own.low < low[t] ? own.low : low[t];
            high[t] = own.high > high[t] ? own.high : high[t];
          }
        }
      }
      KVMELD_UNROLL
      for (index_t t = 0; t < at_once; ++t) {
        low[t] = reduce_min(low[t]), high[t] = reduce_max(high[t]);
        if (lane() == 0 && u0 + t < end) {
          shared.low[u0 % most + t] = low[t], shared.high[u0 % most + t] = high[t];
        }
      }
    }
  }
};

}  // namespace kvmeld::cuda::detail
