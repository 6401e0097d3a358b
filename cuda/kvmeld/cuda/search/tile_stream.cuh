// SPDX-License-Identifier: MIT
/// A block's rows beside others that stream by, and what each row finds best among them.
#pragma once

#include <type_traits>  // std::conditional_t, std::is_same_v

#include "kvmeld/cuda/device/block_collectives.cuh"
#include "kvmeld/cuda/device/half_tile.cuh"
#include "kvmeld/cuda/memory/view.cuh"

namespace kvmeld::cuda::detail {

/// `row_of(i)`, `0 <= i < count`, `[dim]`, or `row_of(i, plane)` where rows are of several planes;
/// `aligned`: all begin at multiples of 16 bytes.
template <class RowOf>
struct streamed_rows {
  RowOf row_of;
  index_t count, dim;
  bool aligned;

  template <index_t Planes>
  KVMELD_DEVICE auto row(index_t i, index_t plane) const {
    if constexpr (Planes == 1) {
      return row_of(i);
    } else {
      return row_of(i, plane);
    }
  }
};
template <class RowOf>
streamed_rows(RowOf, index_t, index_t, bool) -> streamed_rows<RowOf>;

/// Rows of 32 floats in shared memory, four of them a pack, as `half_tile` has halfs.
struct float_tile {
  static constexpr index_t depth = 32, packs = 8;

  KVMELD_DEVICE static index_t place(index_t row, index_t pack) {
    return row * depth + (pack ^ (row & 7)) * 4;
  }
};

/// `warp_sums` of 16 rows of floats with 32 others, by plain products.
struct float_sums : warp_sums<1, 4> {
  template <class Tile, index_t N, index_t M>
  KVMELD_DEVICE void add(const shared_array<float, N>& a, index_t a_at, index_t row0,
                         const shared_array<float, M>& b, index_t b_at, index_t column0) {
    KVMELD_ROLLED
    for (index_t k = 0; k < Tile::packs; ++k) {
      vector_16<float> left[2], right[4][2];
      unrolled<2>(
          [&](index_t i) { left[i] = a.vector(a_at + Tile::place(row0 + row(0, 2 * i), k)); });
      unrolled<4, 2>([&](index_t n, index_t i) {
        right[n][i] = b.vector(b_at + Tile::place(column0 + column(n, i), k));
      });
      unrolled<4, 4, 4>([&](index_t n, index_t i, index_t j) {
        x[0][n][i] += left[i / 2][j] * right[n][i % 2][j];
      });
    }
  }
};

/// A block keeps `rows` rows of up to `Depth` elements in shared memory; others stream by, a part
/// of their elements at a time. Two such parts are in flight or in use. Of 16 bits it keeps `Rows`
/// rows, 128 or 64, and 16 KiB stream by at a time: 128 of them 64 elements deep, or 256 of them 32
/// deep. A warp multiplies 64 rows by 32 others on tensor cores, whose sums stay in its registers.
/// Of floats it keeps half as many; a warp multiplies 16 by 32, by plain products. Narrow rows
/// become `Scalar`s as they are loaded.
template <class Scalar, index_t Depth, index_t Rows = 128>
struct tile_stream {
  static constexpr bool matrix = sizeof(Scalar) == 2;
  static_assert(Rows == 128 || Rows == 64);
  using tile = std::conditional_t<matrix, half_tile<Rows / 2>, float_tile>;
  using sums = std::conditional_t<matrix, warp_sums<4, 4>, float_sums>;
  static constexpr index_t rows = matrix ? Rows : Rows / 2, row_tiles = matrix ? 4 : 1,
                           column_tiles = 4;
  static constexpr index_t of_warp = 16 * row_tiles, width = vector_16<Scalar>::size;
  static constexpr index_t warps = matrix ? 8 : 4, threads = 32 * warps;
  static constexpr index_t across = warps / (rows / of_warp);
  static constexpr index_t columns = across * 32, of_tile = columns * tile::depth;
  static constexpr index_t stages = 2, resident = matrix && rows * Depth <= 128 * 256 ? 2 : 1;
  static constexpr index_t loads = columns * tile::packs / threads, step = threads / tile::packs;
  static constexpr index_t of_own = rows * tile::depth;  ///< a part of the block's own rows
  using products = float[row_tiles][column_tiles][4];
  struct shared_memory {
    shared_array<Scalar, rows * Depth> own;
    shared_union<shared_array<Scalar, stages * of_tile>, shared_array<candidate, across * rows>>
        ring;
  };

  /// A lane's sum `[m][n][i]` is of these.
  KVMELD_DEVICE static index_t row(index_t m, index_t i) {
    return warp() / across * of_warp + sums::row(m, i);
  }
  KVMELD_DEVICE static index_t column(index_t n, index_t i) {
    return warp() % across * 32 + sums::column(n, i);
  }

  /// Starts to copy the block's own rows, those from `first` on: `Depth` elements of all planes.
  template <index_t Planes = 1, class RowOf>
  KVMELD_DEVICE static void keep(shared_memory& shared, index_t first,
                                 const streamed_rows<RowOf>& from) {
    const index_t parts = (from.dim + tile::depth - 1) / tile::depth;
    unrolled<rows / step>([&](index_t u) {
      const index_t r = thread_index() / tile::packs + u * step, i = first + r;
      for (index_t plane = 0; plane < Planes; ++plane) {
        const auto* const row =
            from.template row<Planes>(i < from.count ? i : from.count - 1, plane);
        for (index_t k = 0; k < parts; ++k) {
          copy_pack(shared.own, (plane * parts + k) * of_own, r, k * tile::depth, row,
                    i < from.count, from);
        }
      }
    });
  }

  /// Streams `others` by the rows that `keep` began to copy. Before a tile comes, a thread for each
  /// of its columns `describe(turn, column, i)`s it, `i < 0`: there is none; its sums begin as
  /// `start(turn, column)`; then all `use(sums, turn, the first of its rows)`, or, of several
  /// planes, `use(sums, turn, first, plane)` of one after the other. Two turns alternate.
  template <index_t Planes = 1, class RowOf, class Describe, class Start, class Use>
  KVMELD_DEVICE static void stream(shared_memory& shared, const streamed_rows<RowOf>& others,
                                   Describe describe, Start start, Use use) {
    const index_t parts = (others.dim + tile::depth - 1) / tile::depth;
    const index_t steps = (others.count + columns - 1) / columns * Planes * parts;
    const index_t first = thread_index() / tile::packs;
    // Each thread copies the same rows of every part of a tile.
    using row_of_others = decltype(others.template row<Planes>(0, 0));
    row_of_others from[loads];
    index_t ahead_tile = 0, ahead_plane = 0, ahead_part = 0;
    const auto load = [&](index_t, index_t stage) {
      if (ahead_part == 0) {
        unrolled<loads>([&](index_t u) {
          const index_t i = ahead_tile * columns + first + u * step;
          from[u] =
              others.template row<Planes>(i < others.count ? i : others.count - 1, ahead_plane);
        });
        if (ahead_plane == 0 && thread_index() < columns) {
          const index_t i = ahead_tile * columns + thread_index();
          describe(ahead_tile % 2, thread_index(), i < others.count ? i : -1);
        }
      }
      unrolled<loads>([&](index_t u) {
        const index_t r = first + u * step;
        copy_pack(shared.ring.first, stage * of_tile, r, ahead_part * tile::depth, from[u],
                  ahead_tile * columns + r < others.count, others);
      });
      ahead_part = ahead_part == parts - 1 ? 0 : ahead_part + 1;
      ahead_plane = ahead_part > 0 ? ahead_plane : ahead_plane == Planes - 1 ? 0 : ahead_plane + 1;
      ahead_tile += ahead_part == 0 && ahead_plane == 0 ? 1 : 0;
    };
    sums sum;
    const index_t row0 = warp() / across * of_warp, column0 = warp() % across * 32;
    index_t part = 0, plane = 0, done = 0;
    each_staged<stages>(steps, load, [&](index_t, index_t stage) {
      if (part == 0) {
        sum.each([&](float& x, index_t, index_t at) { x = start(done % 2, column0 + at); });
      }
      sum.template add<tile>(shared.own, (plane * parts + part) * of_own, row0, shared.ring.first,
                             stage * of_tile, column0);
      if (++part == parts) {
        if constexpr (Planes == 1) {
          use(sum.x, done % 2, done * columns);
          part = 0, ++done;
        } else {
          use(sum.x, done % 2, done * columns, plane);
          part = 0, plane = plane == Planes - 1 ? 0 : plane + 1, done += plane == 0 ? 1 : 0;
        }
      }
    });
    sync_block();  // what streamed by is used up
  }

  /// A number of each row for each of the `across` warps that have columns of it; the ring is idle.
  KVMELD_DEVICE static decltype(auto) number_of_row(shared_memory& shared, index_t w, index_t r) {
    return shared.ring.then[w * rows + r];
  }

  /// The best of each row, `best` of a lane's own columns: row r's in thread r. The ring is idle.
  KVMELD_DEVICE static candidate best_of_rows(shared_memory& shared,
                                              const candidate (&best)[row_tiles][2]) {
    unrolled<row_tiles, 2>([&](index_t m, index_t i) {
      const candidate it = reduce_max(best[m][i], 4);
      if (lane() % 4 == 0) {
        number_of_row(shared, warp() % across, row(m, 2 * i)) = it;
      }
    });
    sync_block();
    candidate most = 0;
    if (thread_index() < rows) {
      unrolled<across>([&](index_t w) {
        const candidate it = number_of_row(shared, w, thread_index());
        most = it > most ? it : most;
      });
    }
    return most;
  }

 private:
  template <index_t N, class From, class RowOf>
  KVMELD_DEVICE static void copy_pack(shared_array<Scalar, N>& to, index_t at, index_t r,
                                      index_t begin, const From* row, bool is,
                                      const streamed_rows<RowOf>& from) {
    const index_t pack = thread_index() % tile::packs, i = begin + pack * width;
    const index_t left = is && i < from.dim ? from.dim - i : 0;
    if constexpr (!std::is_same_v<From, Scalar>) {
      to.set_vector(at + tile::place(r, pack),
                    load_as<Scalar>(row, i, is ? from.dim : 0, from.aligned));
    } else if (from.aligned) {
      copy_async(to, at + tile::place(r, pack), row + (left > 0 ? i : 0),
                 (left < width ? left : width) * static_cast<index_t>(sizeof(Scalar)));
    } else {
      to.set_vector(at + tile::place(r, pack), load_row(row, i, is ? from.dim : 0, false));
    }
  }
};

}  // namespace kvmeld::cuda::detail
