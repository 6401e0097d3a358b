// SPDX-License-Identifier: MIT
/// A block's rows beside others that stream by, and what each row finds best among them.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"
#include "kvmeld/cuda/device/half_tile.cuh"
#include "kvmeld/cuda/memory/tile.cuh"

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

/// A block keeps `Rows` rows, 128 or 64, of up to `Depth` elements of 16 bits in shared memory;
/// others stream by, 16 KiB at a time: 128 of them 64 elements deep, or 256 of them 32 deep. Two
/// such parts are in flight or in use. A warp multiplies 64 rows by 32 others on tensor cores,
/// whose sums stay in its registers.
template <class Scalar, index_t Depth, index_t Rows = 128>
struct tile_stream {
  static_assert(sizeof(Scalar) == 2 && (Rows == 128 || Rows == 64));
  using tile = half_tile<Rows / 2>;
  using sums = warp_sums<4, 4>;
  static constexpr index_t warps = 8, threads = 32 * warps, across = warps / (Rows / 64);
  static constexpr index_t rows = Rows, columns = across * 32, of_tile = columns * tile::depth;
  static constexpr index_t row_tiles = 4, column_tiles = 4;
  static constexpr index_t stages = 2, resident = Rows * Depth <= 128 * 256 ? 2 : 1;
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
    return warp() / across * 64 + sums::row(m, i);
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
        const Scalar* const row =
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
    const Scalar* from[loads];
    index_t ahead_tile = 0, ahead_plane = 0, ahead_part = 0, ahead_stage = 0;
    const auto copy = [&] {
      if (ahead_tile * columns < others.count) {
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
          copy_pack(shared.ring.first, ahead_stage * of_tile, r, ahead_part * tile::depth, from[u],
                    ahead_tile * columns + r < others.count, others);
        });
      }
      commit_async();
      ahead_part = ahead_part == parts - 1 ? 0 : ahead_part + 1;
      ahead_plane = ahead_part > 0 ? ahead_plane : ahead_plane == Planes - 1 ? 0 : ahead_plane + 1;
      ahead_tile += ahead_part == 0 && ahead_plane == 0 ? 1 : 0;
      ahead_stage = ahead_stage == stages - 1 ? 0 : ahead_stage + 1;
    };
    for (index_t k = 0; k < stages - 1; ++k) {
      copy();
    }
    sums sum;
    const index_t row0 = warp() / across * 64, column0 = warp() % across * 32;
    KVMELD_ROLLED
    for (index_t s = 0, part = 0, plane = 0, done = 0, stage = 0; s < steps; ++s) {
      wait_async<stages - 2>();
      sync_block();
      copy();
      if (part == 0) {
        sum.each([&](float& x, index_t, index_t at) { x = start(done % 2, column0 + at); });
      }
      sum.template add<tile>(shared.own, (plane * parts + part) * of_own, row0, shared.ring.first,
                             stage * of_tile, column0);
      stage = stage == stages - 1 ? 0 : stage + 1;
      if (++part == parts) {
        if constexpr (Planes == 1) {
          use(sum.x, done % 2, done * columns);
          part = 0, ++done;
        } else {
          use(sum.x, done % 2, done * columns, plane);
          part = 0, plane = plane == Planes - 1 ? 0 : plane + 1, done += plane == 0 ? 1 : 0;
        }
      }
    }
    wait_async<0>();
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
  template <index_t N, class RowOf>
  KVMELD_DEVICE static void copy_pack(shared_array<Scalar, N>& to, index_t at, index_t r,
                                      index_t begin, const Scalar* row, bool is,
                                      const streamed_rows<RowOf>& from) {
    const index_t pack = thread_index() % tile::packs, i = begin + pack * 8;
    const index_t left = is && i < from.dim ? from.dim - i : 0;
    if (from.aligned) {
      copy_async(to, at + tile::place(r, pack), row + (left > 0 ? i : 0),
                 (left < 8 ? left : 8) * static_cast<index_t>(sizeof(Scalar)));
    } else {
      to.set_vector(at + tile::place(r, pack), load_row(row, i, is ? from.dim : 0, false));
    }
  }
};

/// ... of floats, by plain products, 64 rows a block: a warp multiplies 16 rows by 32 others or 16.
template <index_t Depth>
struct tile_stream<float, Depth, 128> {
  using shape = tile_shape<float, Depth>;
  static constexpr index_t threads = shape::threads, rows = shape::rows, columns = shape::columns;
  static constexpr index_t across = 1;
  static constexpr index_t row_tiles = shape::row_tiles, column_tiles = shape::column_tiles;
  static constexpr index_t resident = 1;
  using products = typename shape::products;
  struct shared_memory {
    typename shape::row_array own;
    typename shape::column_array others[2];
    shared_array<candidate, rows> best;
  };

  KVMELD_DEVICE static index_t row(index_t m, index_t i) { return shape::row(m, i); }
  KVMELD_DEVICE static index_t column(index_t n, index_t i) { return shape::column(n, i); }

  template <class RowOf>
  KVMELD_DEVICE static void keep(shared_memory& shared, index_t first,
                                 const streamed_rows<RowOf>& from) {
    load<rows>(shared.own, first, from);
  }

  template <class RowOf, class Describe, class Start, class Use>
  KVMELD_DEVICE static void stream(shared_memory& shared, const streamed_rows<RowOf>& others,
                                   Describe describe, Start start, Use use) {
    const auto copy = [&](index_t c0, index_t turn) {
      if (c0 < others.count) {
        load<columns>(shared.others[turn], c0, others);
        if (thread_index() < columns) {
          const index_t i = c0 + thread_index();
          describe(turn, thread_index(), i < others.count ? i : -1);
        }
      }
      commit_async();
    };
    copy(0, 0);
    KVMELD_ROLLED
    for (index_t c0 = 0, turn = 0; c0 < others.count; c0 += columns, turn ^= 1) {
      copy(c0 + columns, turn ^ 1);
      wait_async<1>();
      sync_block();
      products x;
      unrolled<column_tiles, 4>(
          [&](index_t n, index_t i) { x[0][n][i] = start(turn, column(n, i)); });
      shape::accumulate(shared.own, shared.others[turn], others.dim, x);
      use(x, turn, c0);
      sync_block();  // the tile may be overwritten
    }
    wait_async<0>();
  }

  KVMELD_DEVICE static decltype(auto) number_of_row(shared_memory& shared, index_t, index_t r) {
    return shared.best[r];
  }

  KVMELD_DEVICE static candidate best_of_rows(shared_memory& shared,
                                              const candidate (&best)[row_tiles][2]) {
    unrolled<2>([&](index_t i) {
      const candidate it = reduce_max(best[0][i], 4);
      if (lane() % 4 == 0) {
        shared.best[row(0, 2 * i)] = it;
      }
    });
    sync_block();
    return thread_index() < rows ? shared.best[thread_index()] : candidate{0};
  }

 private:
  template <index_t Count, index_t N, class RowOf>
  KVMELD_DEVICE static void load(shared_array<float, N>& to, index_t first,
                                 const streamed_rows<RowOf>& from) {
    const auto row_of = [&](index_t r) {
      return first + r < from.count ? from.row_of(first + r) : nullptr;
    };
    shape::template load<Count>(to, row_of, from.row_of(0), from.dim, from.aligned);
  }
};

}  // namespace kvmeld::cuda::detail
