/// fold: the mean and the covariance of a head's keys or queries, on tensor cores.
#pragma once

#include <cstdint>      // std::int64_t
#include <type_traits>  // std::integral_constant

#include "kvfold/cuda/device/split_rows.cuh"
#include "kvfold/cuda/memory/rope_params.cuh"
#include "kvfold/cuda/memory/workspace.cuh"

namespace kvfold::cuda::detail {

/// Sums of rows `x [dim]`, then of `x xᵀ`, the lower triangle row by row.
struct moment_sums {
  float* data;

  KVFOLD_HD static std::ptrdiff_t size(index_t dim) {
    return dim + std::ptrdiff_t{dim} * (dim + 1) / 2;
  }
  /// Row `i` of the triangle `[i + 1]`.
  KVFOLD_DEVICE float* row(index_t i, index_t dim) const {
    return data + dim + std::ptrdiff_t{i} * (i + 1) / 2;
  }
};

/// As many parts of a head's rows as give two blocks to each of an H100's multiprocessors, of 128
/// rows or more. By shape alone: the same bytes whatever the device.
inline index_t moment_parts(index_t heads, index_t rows) {
  constexpr index_t blocks_wanted = 256, most = 32, least_rows = 128;
  const index_t wanted = (blocks_wanted + heads - 1) / (heads < 1 ? 1 : heads),
                have = (rows + least_rows - 1) / least_rows;
  const index_t parts = wanted < most ? wanted : most;
  return have < 1 ? 1 : have < parts ? have : parts;
}

/// What `covariance_of` works in, and leaves.
struct moment_scratch {
  float* sums;        ///< [heads, moment_parts, moment_sums::size(dim)]
  float* mean;        ///< [heads, dim]
  float* covariance;  ///< [heads, dim, dim]

  /// For up to `rows` rows of a head.
  void allocate(workspace_allocator& from, index_t heads, index_t dim, index_t rows) {
    const auto n = static_cast<std::size_t>(heads), d = static_cast<std::size_t>(dim);
    sums = from.take<float>(n * static_cast<std::size_t>(moment_parts(heads, rows)) *
                            static_cast<std::size_t>(moment_sums::size(dim)));
    mean = from.take<float>(n * d), covariance = from.take<float>(n * d * d);
  }
};

/// Sums of `x − x_o` over a part of a head's rows, and of its products: the row in the middle is
/// `x_o`, so that a mean far from 0 costs no digits. Of `Rows`, which make what they are asked for:
///
///     asks(h), count(h)     are there rows `[dim]`, and how many
///     of(h).load(r, p)      what pair `p` of row `r`, below (dim + 1) / 2, is made of
///     of(h).number(x, p)    ... and the `number_pair`
///
/// A block takes some rows at a time: a thread
/// splits two numbers of eight of them, then warps multiply them by each other. A warp has tiles of
/// 16 × 16 of two rows of the triangle of tiles, of the i-th and the i-th last, all of them or
/// every other one.
template <class Rows, index_t Depth>
struct sum_moments {
  static constexpr index_t threads = 256, resident = Depth > 128 ? 1 : 2;
  static constexpr index_t some = 4096 / Depth;                  // rows at a time
  static constexpr index_t lanes = Depth / 2;                    // a pair of numbers each
  static constexpr index_t at_once = threads / lanes;            // rows
  static constexpr index_t blocks = Depth / 16;                  // tiles of the triangle's last row
  static constexpr index_t sharing = threads / 32 * 2 / blocks;  // warps
  static constexpr index_t own = blocks / sharing + 1;           // tiles
  using split = split_tile<some, Depth>;
  struct shared_memory {
    shared_array<bfloat16, 2 * split::size> x;  // two turns
    shared_array<float, at_once * Depth> sum;
  };

  active_heads active;
  index_t dim;
  Rows rows;
  index_t* planned;  // [heads] 0: the head is asked; −1: it is not. Or null
  float* sums;       // [heads, parts, moment_sums::size(dim)]

  /// Grid: heads, parts.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = active.head(), n = rows.count(h);
    const auto part = static_cast<index_t>(block_index().y), parts = static_cast<index_t>(grid().y);
    const bool asks = rows.asks(h);
    if (planned != nullptr && part == 0 && thread_index() == 0) {
      planned[h] = asks ? 0 : -1;
    }
    if (!asks) {
      return;
    }
    const index_t turns = (n + some - 1) / some;
    const auto first = static_cast<index_t>(std::int64_t{turns} * part / parts),
               end = static_cast<index_t>(std::int64_t{turns} * (part + 1) / parts);
    const index_t p = thread_index() % lanes, row = thread_index() / lanes;
    const bool has = p < (dim + 1) / 2 && n > 0;
    const auto own_rows = rows.of(h);
    number_pair from, sum;
    if (has) {
      sum = from = own_rows.number(own_rows.load(n / 2, p), p);
      sum.x = sum.y = 0;
    }
    if (dim < Depth) {  // behind a row there are zeros
      for (index_t e = thread_index() * 8; e < 2 * split::size; e += threads * 8) {
        shared.x.set_vector(e, {});
      }
      sync_block();
    }
    float products[own][2][4] = {};
    KVFOLD_ROLLED
    for (index_t turn = first; turn < end; ++turn) {
      const index_t at = (turn - first) % 2 * split::size;
      if (has) {
        constexpr index_t many = some / at_once;
        decltype(own_rows.load(0, 0)) next[many];  // all on their way at once
        KVFOLD_UNROLL
        for (index_t u = 0; u < many; ++u) {
          const index_t r = turn * some + u * at_once + row;
          next[u] = own_rows.load(r < n ? r : n - 1, p);
        }
        KVFOLD_UNROLL
        for (index_t u = 0; u < many; ++u) {
          const index_t r = u * at_once + row;
          number_pair x = own_rows.number(next[u], p);
          const bool is = turn * some + r < n;  // behind the last row there are zeros
          x.x = is ? x.x - from.x : 0.0F, x.y = is ? x.y - from.y : 0.0F;
          sum.x += x.x, sum.y += x.y;
          x.each([&](index_t i, float number) { split::put(shared.x, at, r, i, number); });
        }
      }
      sync_block();  // these are there, and those before the last used up
      KVFOLD_ROLLED
      for (index_t k = 0; k < some; k += 16) {
        multiply(shared, at, k, products);
      }
    }
    if (has) {
      sum.each([&](index_t i, float x) { shared.sum[row * Depth + i] = x; });
    }
    sync_block();
    const moment_sums to{sums + (std::ptrdiff_t{h} * parts + part) * moment_sums::size(dim)};
    for (index_t i = thread_index(); i < dim; i += threads) {
      float x = 0;
      for (index_t r = 0; r < at_once && n > 0; ++r) {
        x += shared.sum[r * Depth + i];
      }
      to.data[i] = x;
    }
    each_tile([&](index_t t, index_t tile_row, index_t tile_column, bool) {
      KVFOLD_UNROLL
      for (index_t e = 0; e < 2; ++e) {
        KVFOLD_UNROLL
        for (index_t u = 0; u < 4; ++u) {
          const index_t i = tile_row + lane() / 4 + (u >= 2 ? 8 : 0);
          const index_t j = tile_column + e * 8 + lane() % 4 * 2 + (u & 1);
          if (j <= i && i < dim) {
            to.row(i, dim)[j] = products[t][e][u];
          }
        }
      }
    });
  }

 private:
  /// A warp's tiles: `use(number, row, column, whether it is of the later row)`.
  template <class Use>
  KVFOLD_DEVICE void each_tile(Use use) const {
    const index_t early = warp() / sharing, late = blocks - 1 - early;
    KVFOLD_UNROLL
    for (index_t t = 0; t < own; ++t) {
      const index_t e = warp() % sharing + t * sharing;
      const bool later = e > early;
      const index_t tile_row = (later ? late : early) * 16,
                    tile_column = (later ? e - early - 1 : e) * 16;
      if (e <= blocks && tile_row < dim && tile_column < dim) {
        use(t, tile_row, tile_column, later);
      }
    }
  }
  /// 16 of the rows at `at`, from `k` on.
  KVFOLD_DEVICE void multiply(const shared_memory& shared, index_t at, index_t k,
                              float (&products)[own][2][4]) const {
    using tile = typename split::tile;
    const index_t early = warp() / sharing * 16, late = Depth - 16 - early;
    split_matrices of_early, of_late;
    KVFOLD_UNROLL
    for (index_t part = 0; part < split::parts; ++part) {
      const index_t from = at + part * split::part;
      of_early.of[part] = tile::left_of_columns(shared.x, from, early, k);
      of_late.of[part] = tile::left_of_columns(shared.x, from, late, k);
    }
    each_tile([&](index_t t, index_t, index_t tile_column, bool later) {
      split_matrices left, right;
      KVFOLD_UNROLL
      for (index_t part = 0; part < split::parts; ++part) {
        KVFOLD_UNROLL
        for (index_t e = 0; e < 4; ++e) {  // word by word: registers have no addresses
          left.of[part].of[e] = later ? of_late.of[part].of[e] : of_early.of[part].of[e];
        }
        right.of[part] = tile::right_of_columns(shared.x, at + part * split::part, tile_column, k);
      }
      multiply_split(left, right, products[t]);
    });
  }
};

/// Mean and `scale · (covariance + more · I)`, of the sums of all parts. A block has 8 rows, a warp
/// one of them.
template <class Rows>
struct make_covariance {
  static constexpr index_t threads = 256, rows_of_block = threads / 32;
  struct shared_memory {
    shared_array<float, max_dim> mean;  // less the row that was subtracted
  };

  active_heads active;
  index_t dim;
  Rows rows;
  const index_t* planned;  // [heads]
  index_t parts;
  float scale, more;
  moment_scratch of;

  /// Grid: heads, stretches of `rows_of_block`.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = active.head(), n = rows.count(h);
    const std::ptrdiff_t size = moment_sums::size(dim);
    if (planned[h] < 0) {
      return;
    }
    const float* const first = of.sums + std::ptrdiff_t{h} * parts * size;
    const float share = 1.0F / static_cast<float>(n > 0 ? n : 1);
    const auto mean_of_parts = [&](const float* x) {
      float sum = 0;
      for (index_t k = 0; k < parts; ++k) {
        sum += x[k * size];
      }
      return share * sum;
    };
    for (index_t i = thread_index(); i < dim; i += threads) {
      shared.mean[i] = mean_of_parts(first + i);
    }
    sync_block();
    if (block_index().y == 0 && n > 0) {
      for (index_t p = thread_index(); p < (dim + 1) / 2; p += threads) {
        const auto own = rows.of(h);
        own.number(own.load(n / 2, p), p).each([&](index_t i, float x) {
          of.mean[std::ptrdiff_t{h} * dim + i] = x + shared.mean[i];
        });
      }
    }
    const index_t i = static_cast<index_t>(block_index().y) * rows_of_block + warp();
    if (i >= dim) {
      return;
    }
    float* const to = of.covariance + std::ptrdiff_t{h} * dim * dim;
    const float* const row = moment_sums{const_cast<float*>(first)}.row(i, dim);
    for (index_t j = lane(); j <= i; j += 32) {
      const float x = mean_of_parts(row + j) - shared.mean[i] * shared.mean[j];
      const float y = scale * (i == j ? x + more : x);
      to[std::ptrdiff_t{i} * dim + j] = y, to[std::ptrdiff_t{j} * dim + i] = y;
    }
  }
};

/// `mean` and `covariance` of what a head has in `rows`, `most_rows` at most: every row counts
/// once. Says in `planned`, where it `Plans`, of which heads these are. Two launches.
template <bool Plans, class Scalar, class Rows>
void covariance_of(const cache_view<Scalar>& cache, const Rows& rows, index_t most_rows,
                   index_t* planned, float scale, float more, const moment_scratch& work,
                   stream stream) {
  const auto heads = cache.blocks();
  const index_t parts = moment_parts(cache.heads, most_rows);
  const active_heads active{cache.active};
  const auto sum = [&]<index_t Depth>(std::integral_constant<index_t, Depth>) {
    launch(sum_moments<Rows, Depth>{active, cache.dim, rows, Plans ? planned : nullptr, work.sums},
           {heads, static_cast<unsigned>(parts)}, stream);
  };
  if (cache.dim <= 128) {
    sum(std::integral_constant<index_t, 128>{});
  } else {
    sum(std::integral_constant<index_t, 256>{});
  }
  using covariance = make_covariance<Rows>;
  constexpr index_t stretch = covariance::rows_of_block;
  launch(covariance{active, cache.dim, rows, planned, parts, scale, more, work},
         {heads, static_cast<unsigned>((cache.dim + stretch - 1) / stretch)}, stream);
}

}  // namespace kvfold::cuda::detail
