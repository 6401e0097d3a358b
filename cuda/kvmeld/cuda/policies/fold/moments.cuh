// SPDX-License-Identifier: MIT
/// fold: sums of a head's keys or queries and of their products, on tensor cores.
#pragma once

#include "kvmeld/cuda/device/split_rows.cuh"
#include "kvmeld/cuda/memory/rope_params.cuh"
#include "kvmeld/cuda/memory/workspace.cuh"

namespace kvmeld::cuda::detail {

/// Sums of rows `x [dim]`, then of `x xᵀ`, the lower triangle row by row.
struct moment_sums {
  float* data;

  KVMELD_HD static std::ptrdiff_t size(index_t dim) {
    return dim + std::ptrdiff_t{dim} * (dim + 1) / 2;
  }
  /// Row `i` of the triangle `[i + 1]`.
  KVMELD_DEVICE float* row(index_t i, index_t dim) const {
    return data + dim + std::ptrdiff_t{i} * (i + 1) / 2;
  }
};

/// Rows of a part: few enough for many blocks of few heads, the same whatever heads run beside it.
inline constexpr index_t moment_rows = 512;
KVMELD_HD inline index_t moment_parts(index_t rows) {
  return rows < 1 ? 1 : (rows + moment_rows - 1) / moment_rows;
}

/// What `covariance_of` works in, and leaves.
struct moment_scratch {
  float* sums;        ///< [heads, moment_parts, moment_sums::size(dim)]
  float* mean;        ///< [heads, dim]
  float* covariance;  ///< [heads, dim, dim]

  /// For up to `rows` rows of a head.
  void allocate(workspace_allocator& from, index_t heads, index_t dim, index_t rows) {
    const auto n = static_cast<std::size_t>(heads), d = static_cast<std::size_t>(dim);
    sums = from.take<float>(n * static_cast<std::size_t>(moment_parts(rows)) *
                            static_cast<std::size_t>(moment_sums::size(dim)));
    mean = from.take<float>(n * d), covariance = from.take<float>(n * d * d);
  }
};

/// Sums of `x − m` over a part of a head's rows, and of its products, `m` the mean of some that are
/// evenly spread (of all where these are few): so a mean far from 0 costs no digits, nor does a row
/// far from it. Of `Rows`, which make what they are asked for:
///
///     asks(h), count(h)       are rows `[dim]` asked for, and how many there are, at least 1 then
///     of(h).load(r, p, to)    what pair `p`, below (dim + 1) / 2, of the rows `r` is made of
///     of(h).number(x, p)      ... and the `number_pair`
///
/// A block takes some rows at a time: a thread splits two numbers of eight of them, then warps
/// multiply them by each other. A warp has tiles of 16 × 16 of two rows of the triangle of tiles,
/// of the i-th and the i-th last, all of them or a share.
template <class Rows, index_t Depth>
struct sum_moments {
  static constexpr index_t threads = 256, resident = Depth > 128 ? 1 : 2;
  static constexpr index_t some = 4096 / Depth;                  // rows at a time
  static constexpr index_t lanes = Depth / 2;                    // a pair of numbers each
  static constexpr index_t at_once = threads / lanes;            // rows
  static constexpr index_t blocks = Depth / 16;                  // tiles of the triangle's last row
  static constexpr index_t sharing = threads / 32 * 2 / blocks;  // warps
  static constexpr index_t own = blocks / sharing + 1;           // tiles
  static constexpr index_t spread = 64;                          // rows that `m` is the mean of
  static constexpr index_t many = some / at_once;                // rows of a thread at once
  using split = split_tile<some, Depth>;
  struct shared_memory {
    shared_array<bfloat16, 2 * split::size> x;  // two turns
    shared_array<float, at_once * Depth> sum;   // of threads, then of the block
  };

  active_heads active;
  index_t dim;
  Rows rows;
  index_t* planned;   // [heads] 0: the head is asked; −1: it is not. Or null
  moment_scratch to;  // `mean` becomes m

  /// Grid: heads, parts.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = active.head(), n = rows.count(h);
    const auto part = block_y(), parts = grid_y();
    const bool asks = rows.asks(h);
    if (planned != nullptr && part == 0 && thread_index() == 0) {
      planned[h] = asks ? 0 : -1;
    }
    const index_t first = part * moment_rows,
                  end = n < first + moment_rows ? n : first + moment_rows;
    if (!asks || first >= n) {
      return;
    }
    const index_t p = thread_index() % lanes, row = thread_index() / lanes;
    const bool has = p < (dim + 1) / 2;
    const auto own_rows = rows.of(h);
    const number_pair from = mean_of_spread(shared, own_rows, n, p, row, has);
    if (part == 0 && has && row == 0) {
      from.each([&](index_t i, float x) { to.mean[std::ptrdiff_t{h} * dim + i] = x; });
    }
    number_pair sum = from;
    sum.x = sum.y = 0;
    if (dim < Depth) {  // behind a row there are zeros
      for (index_t e = thread_index() * 8; e < 2 * split::size; e += threads * 8) {
        shared.x.set_vector(e, {});
      }
      sync_block();
    }
    float products[own][2][4] = {};
    KVMELD_ROLLED
    for (index_t r0 = first; r0 < end; r0 += some) {
      const index_t at = (r0 - first) / some % 2 * split::size;
      if (has) {
        loaded next[many];
        load(own_rows, next, p, [&](index_t u) {
          const index_t r = r0 + u * at_once + row;
          return r < n ? r : n - 1;
        });
        unrolled<many>([&](index_t u) {
          const index_t r = u * at_once + row;
          number_pair x = own_rows.number(next[u], p);
          const bool is = r0 + r < n;  // behind the last row there are zeros
          x.x = is ? x.x - from.x : 0.0F, x.y = is ? x.y - from.y : 0.0F;
          sum.x += x.x, sum.y += x.y;
          x.each([&](index_t i, float number) { split::put(shared.x, at, r, i, number); });
        });
      }
      sync_block();  // these are there, and those before the last used up
      KVMELD_ROLLED
      for (index_t k = 0; k < some; k += 16) {
        multiply(shared, at, k, products);
      }
    }
    const moment_sums out{to.sums + (std::ptrdiff_t{h} * parts + part) * moment_sums::size(dim)};
    add_up(shared, sum, row, has);
    for (index_t i = thread_index(); i < dim; i += threads) {
      out.data[i] = shared.sum[i];
    }
    each_tile([&](index_t t, index_t tile_row, index_t tile_column) {
      unrolled<2, 4>([&](index_t e, index_t u) {
        const index_t i = tile_row + lane() / 4 + (u >= 2 ? 8 : 0);
        const index_t j = tile_column + e * 8 + lane() % 4 * 2 + (u & 1);
        if (j <= i && i < dim) {
          out.row(i, dim)[j] = products[t][e][u];
        }
      });
    });
  }

 private:
  using loaded = typename Rows::of_head::loaded;

  /// Pair `p` of the rows `row_of(0), row_of(1), ...`, all in flight at once.
  template <class RowOf>
  KVMELD_DEVICE static void load(const typename Rows::of_head& from, loaded (&to)[many], index_t p,
                                 RowOf row_of) {
    index_t r[many];
    unrolled<many>([&](index_t u) { r[u] = row_of(u); });
    from.load(r, p, to);
  }
  /// `shared.sum [dim]` of all threads' pairs. A barrier before and after.
  KVMELD_DEVICE void add_up(shared_memory& shared, const number_pair& own_sum, index_t row,
                            bool has) const {
    sync_block();  // the last use is over
    if (has) {
      own_sum.each([&](index_t i, float x) { shared.sum[row * Depth + i] = x; });
    }
    sync_block();
    float x = 0;
    if (const index_t i = thread_index(); i < dim) {  // one thread a number: no one else reads it
      for (index_t r = 0; r < at_once; ++r) {
        x += shared.sum[r * Depth + i];
      }
      shared.sum[i] = x;
    }
    sync_block();
  }
  /// Of `spread` rows, evenly, or of all that there are.
  KVMELD_DEVICE number_pair mean_of_spread(shared_memory& shared,
                                           const typename Rows::of_head& own_rows, index_t n,
                                           index_t p, index_t row, bool has) const {
    const index_t taken = n < spread ? n : spread, apart = n / taken;
    number_pair sum;
    KVMELD_ROLLED
    for (index_t e0 = 0; e0 < taken && has; e0 += many * at_once) {
      loaded next[many];
      load(own_rows, next, p, [&](index_t u) {
        const index_t e = e0 + u * at_once + row;
        return (e < taken ? e : 0) * apart;
      });
      unrolled<many>([&](index_t u) {
        const number_pair x = own_rows.number(next[u], p);
        const bool is = e0 + u * at_once + row < taken;
        sum = {x.i, x.j, sum.x + (is ? x.x : 0.0F), sum.y + (is ? x.y : 0.0F)};
      });
    }
    add_up(shared, sum, row, has);
    const float share = 1.0F / static_cast<float>(taken);
    sum.x = sum.i < 0 ? 0.0F : share * shared.sum[sum.i];
    sum.y = sum.j < 0 ? 0.0F : share * shared.sum[sum.j];
    return sum;
  }
  /// A warp's tiles, those of a row one after another: `use(number, row, column)`.
  template <class Use>
  KVMELD_DEVICE void each_tile(Use use) const {
    const index_t early = warp() / sharing, late = blocks - 1 - early;
    unrolled<own>([&](index_t t) {
      const index_t e = warp() % sharing + t * sharing;
      const bool later = e > early;
      const index_t tile_row = (later ? late : early) * 16,
                    tile_column = (later ? e - early - 1 : e) * 16;
      if (e <= blocks && tile_row < dim && tile_column < dim) {
        use(t, tile_row, tile_column);
      }
    });
  }
  /// 16 of the rows at `at`, from `k` on.
  KVMELD_DEVICE void multiply(const shared_memory& shared, index_t at, index_t k,
                              float (&products)[own][2][4]) const {
    using tile = typename split::tile;
    split_matrices left;
    index_t row_of_left = -1;  // its second row of tiles comes once, behind the first
    each_tile([&](index_t t, index_t tile_row, index_t tile_column) {
      split_matrices right;
      unrolled<split::parts>([&](index_t part) {
        const index_t from = at + part * split::part;
        if (tile_row != row_of_left) {
          left.of[part] = tile::left_of_columns(shared.x, from, tile_row, k);
        }
        right.of[part] = tile::right_of_columns(shared.x, from, tile_column, k);
      });
      row_of_left = tile_row;
      multiply_split(left, right, products[t]);
    });
  }
};

}  // namespace kvmeld::cuda::detail
