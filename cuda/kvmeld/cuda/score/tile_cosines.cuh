// SPDX-License-Identifier: MIT
/// Cosines of a few of a head's rows with others, as these come by in tiles.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"
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

/// Compares 8 rows of a head, keys or values, with tile after tile, by a warp. Products and squares
/// come from the tile as it lies there for attention, on tensor cores: three products for every 16
/// elements of 16 slots, and a square is the diagonal of a tile's product with itself. A cosine
/// hangs on its two rows alone, not on what else they are compared with.
///
/// A lane has rows 2 (lane mod 4) and the next, and of tiles slots lane / 4 and 8 further on.
template <class Scalar, index_t Depth>
class tile_cosines {
 public:
  using tile = warp_tile<Scalar, Depth>;
  static constexpr index_t size = compared_rows * Depth;  // elements of the rows
  /// What multiplying a tile accumulates.
  struct products {
    matrices rows;
    float dot[4] = {}, low[4] = {}, high[4] = {};
  };

  /// Starts to copy the rows of slots `slot_of(r)`, −1: none, of the lane's group of copies.
  template <index_t N, class SlotOf>
  KVMELD_DEVICE static void begin(shared_array<Scalar, N>& to, index_t at,
                                  const head_rows<Scalar>& rows, index_t dim, SlotOf slot_of) {
    constexpr index_t many = tile::packs >= 32 ? 1 : 32 / tile::packs;
    const index_t pack = lane() % tile::packs;
    for (index_t r = lane() / tile::packs; r < compared_rows; r += many) {
      const index_t s = slot_of(r);
      const bool is = s >= 0 && pack * 8 < dim;
      copy_async(to, at + tile::place(r, pack), is ? rows.at(s) + pack * 8 : rows.data,
                 is ? 16 : 0);
    }
  }
  /// The rows' own lengths, once they are there.
  template <index_t N>
  KVMELD_DEVICE void measure(const shared_array<Scalar, N>& rows, index_t at) {
    float square[4] = {};
    KVMELD_UNROLL
    for (index_t d = 0; d < Depth / 16; d += 2) {
      const auto b = right(rows, at, d);
      KVMELD_UNROLL
      for (index_t j = 0; j < 4; j += 2) {
        const unsigned left_side[4] = {b.of[j], b.of[j], b.of[j + 1], b.of[j + 1]};
        const unsigned right_side[2] = {b.of[j], b.of[j + 1]};
        mma_16x8x16<Scalar>(square, left_side, right_side);
      }
    }
    KVMELD_UNROLL
    for (index_t j = 0; j < 2; ++j) {
      const index_t r = lane() % 4 * 2 + j;
      length_[j] = square_root(shuffle(of_diagonal(square[0], square[1]), 4 * r + r / 2));
    }
  }

  /// Elements `16 d ...` of a tile, which is `a`; all `d` from 0 on.
  template <index_t N>
  KVMELD_DEVICE static void multiply(products& x, const shared_array<Scalar, N>& rows, index_t at,
                                     index_t d, const matrices& a) {
    if (d % 2 == 0) {
      x.rows = right(rows, at, d);
    }
    const unsigned b[2] = {x.rows.of[d % 2 * 2], x.rows.of[d % 2 * 2 + 1]};
    const unsigned low[2] = {a.of[0], a.of[2]}, high[2] = {a.of[1], a.of[3]};
    mma_16x8x16<Scalar>(x.dot, a.of, b);
    mma_16x8x16<Scalar>(x.low, a.of, low);    // slots 0 to 7, and
    mma_16x8x16<Scalar>(x.high, a.of, high);  // 8 to 15 of the tile, each with themselves
  }
  /// `use(i, j, cosine)` of slot `lane / 4 + 8 i` of a tile and row `j`; 0 when either is zero.
  template <class Use>
  KVMELD_DEVICE void each(const products& x, Use use) const {
    const index_t row = lane() / 4;
    const float length[2] = {
        square_root(shuffle(of_diagonal(x.low[0], x.low[1]), 4 * row + row / 2)),
        square_root(shuffle(of_diagonal(x.high[2], x.high[3]), 4 * row + row / 2))};
    unrolled<2, 2>([&](index_t i, index_t j) {
      const float lengths = length_[j] * length[i];
      use(i, j, lengths > 0 ? x.dot[2 * i + j] / lengths : 0.0F);
    });
  }

 private:
  /// Elements `16 d .. 16 d + 31` of all rows.
  template <index_t N>
  KVMELD_DEVICE static matrices right(const shared_array<Scalar, N>& rows, index_t at, index_t d) {
    return load_matrices(rows, at + tile::place(lane() % 8, 2 * d + lane() / 8));
  }
  /// In lane 4 r + r / 2 the diagonal's element r, of columns 2 (lane mod 4) and the next.
  KVMELD_DEVICE static float of_diagonal(float even, float odd) {
    return lane() / 4 % 2 == 0 ? even : odd;
  }

  float length_[2] = {};
};

/// Of the lanes' best of rows 2 (lane mod 4) and the next, the warp's into `to[first ...]`.
template <index_t N>
KVMELD_DEVICE void write_best(shared_array<candidate, N>& to, index_t first,
                              const candidate (&mine)[2]) {
  KVMELD_UNROLL
  for (index_t j = 0; j < 2; ++j) {
    candidate best = mine[j];
    KVMELD_UNROLL
    for (index_t d = 4; d < 32; d *= 2) {
      const candidate other = shuffle_xor(best, d);
      best = other > best ? other : best;
    }
    if (lane() < 4) {
      to[first + lane() * 2 + j] = best;
    }
  }
}

/// ... the block's into `to`.
template <index_t Warps, index_t N>
KVMELD_DEVICE void write_best_of_warps(shared_array<candidate, N>& of_warps, candidate* to) {
  const index_t r = thread_index();
  if (r < compared_rows) {
    candidate best = 0;
    KVMELD_UNROLL
    for (index_t w = 0; w < Warps; ++w) {
      const candidate x = of_warps[w * compared_rows + r];
      best = x > best ? x : best;
    }
    to[r] = best;
  }
}

/// Attention alone.
template <class Scalar, index_t Depth>
struct nothing_compared {
  static constexpr bool compares = false, of_values = false;
  struct products {};
};

}  // namespace kvmeld::cuda::detail
