// SPDX-License-Identifier: MIT
/// Tiles of 16-bit rows in shared memory, a warp's own.
#pragma once

#include "kvmeld/cuda/memory/view.cuh"

namespace kvmeld::cuda::detail {

/// A tile of 16-bit rows up to `Depth` long in shared memory, anywhere in an array.
template <class Scalar, index_t Depth>
struct warp_tile {
  static constexpr index_t size = 16 * Depth;  // elements
  static constexpr index_t packs = Depth / 8;  // of 16 bytes, a row
  /// A cache hint at 256 dims was an illegal instruction on an H100.
  static constexpr reads how = Depth > 128 ? reads::again : reads::once;

  /// Where 16 bytes of a row lie: turned, so that those of 8 rows meet different banks.
  KVMELD_DEVICE static index_t place(index_t row, index_t pack) {
    return (row * packs + (pack ^ (row & 7))) * 8;
  }

  /// Starts to copy the rows of slots `s0 .. s0 + 15`, zeros from slot `end` and element `dim` on.
  /// Rows lie evenly: `s0` is a multiple of 16, so where pages hold a multiple of 16 slots one page
  /// has them all. Those of other pages are looked up one by one.
  template <index_t N>
  KVMELD_DEVICE static void load(shared_array<Scalar, N>& to, index_t at,
                                 const head_rows<Scalar>& rows, index_t dim, index_t end,
                                 index_t s0) {
    constexpr index_t many = packs >= 32 ? 1 : 32 / packs;  // rows of a warp's copy
    const index_t pack = lane() % packs, r0 = lane() / packs;
    const index_t bytes = pack * 8 < dim ? 16 : 0;
    if (s0 + 16 <= end && (rows.table == nullptr || rows.pages.slots % 16 == 0)) {
      const Scalar* const from = rows.at(s0) + r0 * rows.row + pack * 8;
      KVMELD_UNROLL
      for (index_t r = 0; r < 16; r += many) {
        copy_async<how>(to, at + place(r0 + r, pack), from + r * rows.row, bytes);
      }
    } else {
      for (index_t r = r0; r < 16; r += many) {
        const bool is = s0 + r < end;
        const Scalar* const from = rows.at(is ? s0 + r : s0) + pack * 8;
        copy_async<how>(to, at + place(r, pack), from, is ? bytes : 0);
      }
    }
  }

  /// Elements `16 d .. 16 d + 15` of all rows, as the tensor cores' left side.
  template <index_t N>
  KVMELD_DEVICE static matrices left(const shared_array<Scalar, N>& from, index_t at, index_t d) {
    return load_matrices(from, at + place(lane() % 16, 2 * d + lane() / 16));
  }
};

}  // namespace kvmeld::cuda::detail
