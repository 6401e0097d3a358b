// SPDX-License-Identifier: MIT
/// Back substitution through a ridge's factor, in one launch.
#pragma once

#include "kvmeld/cuda/merge/ridge_system.cuh"

namespace kvmeld::cuda::detail {

/// 32 columns of X from the last unknowns up: `X_jᵀ = (Y_jᵀ − Σ_i X_iᵀ L_ij) L_jj⁻¹`, i > j. Tiles
/// of the factor stream by, 32 rows at a time, and with them the X_i that were written before; the
/// last one stays in shared memory. Eight warps: 2 × 16 columns of X, 4 × 32 of a tile's.
struct substitute_back {
  using tile = ridge_system::tile;
  using wide = half_tile<tile::side>;  // rows of a tile, and short ones
  using narrow = half_tile<32>;
  static constexpr index_t threads = 256, resident = 2;
  static constexpr index_t columns = 32, rows = 32, stages = 4, pieces = tile::side / rows;
  static constexpr index_t part = rows * tile::side, solved_part = columns * rows;
  static constexpr index_t latest_part = columns * tile::side;
  struct shared_memory {
    shared_array<half, stages * 2 * part> factor;
    shared_array<half, stages * 2 * solved_part> solved;  // Xᵀ
    shared_array<half, 2 * latest_part> latest;           // what is left of Yᵀ, then Xᵀ
  };

  ridge_system of;
  const index_t* row;  // [heads, capacity] of each unknown; null (of the dual): nothing goes out
  index_t capacity;
  float* out;  // [heads, capacity, dim]

  /// Grid: heads, blocks of columns.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = of.active.head(), have = of.tiles_of(h);
    const index_t first = block_y() * columns;
    place next{have - 1, have - 1, 0}, now = next;  // of the piece to be loaded, and used
    sums sum = {};
    each_staged<stages>(
        pieces * (have * (have + 1) / 2),
        [&](index_t, index_t stage) {
          copy(shared, next, h, first, stage);
          next.advance(have);
        },
        [&](index_t, index_t stage) {
          const bool inverse = now.i == now.j;
          if (inverse && now.piece == 0) {
            put_rest(shared, sum, h, now.j, first);
          }
          multiply(shared, stage, now.i <= now.j + 1, now.piece, sum);
          if (inverse && now.piece == pieces - 1) {
            put_solution(shared, sum, h, now.j, first);
          }
          now.advance(have);
        });
  }

 private:
  using sums = float[4][4];  // `[n][u]` of `column(u)` of X and `unknown(n, u)` of a tile

  /// Column `j` takes the tiles below it from the last on, then the inverse of its diagonal.
  struct place {
    index_t i, j, piece;

    KVMELD_DEVICE void advance(index_t have) {
      if (++piece == pieces) {
        piece = 0;
        if (--i < j) {
          --j, i = have - 1;
        }
      }
    }
  };

  KVMELD_DEVICE static index_t column(index_t u) {
    return warp() / 4 * 16 + lane() / 4 + (u >= 2 ? 8 : 0);
  }
  KVMELD_DEVICE static index_t unknown(index_t n, index_t u) {
    return warp() % 4 * 32 + n * 8 + lane() % 4 * 2 + (u & 1);
  }
  KVMELD_DEVICE void copy(shared_memory& shared, const place& of_piece, index_t h, index_t first,
                          index_t stage) const {
    const auto [i, j, piece] = of_piece;
    const half* const from =
        (i > j ? of.numbers(h, i, j) : of.inverse_of(h, j)) + piece * rows * tile::side;
    constexpr index_t packs = tile::side / 8, short_packs = rows / 8;
    KVMELD_UNROLL
    for (index_t e0 = 0; e0 < 2 * rows * packs; e0 += threads) {
      const index_t e = e0 + thread_index(), half_of = e / (rows * packs);
      const index_t r = e / packs % rows, p = e % packs;
      copy_async(shared.factor, (stage * 2 + half_of) * part + wide::place(r, p),
                 from + half_of * tile::size + r * tile::side + p * 8);
    }
    if (i > j + 1) {
      const index_t e = thread_index(), half_of = e / (columns * short_packs);
      const index_t r = e / short_packs % columns, p = e % short_packs;
      static_assert(threads == 2 * columns * short_packs);
      copy_async(shared.solved, (stage * 2 + half_of) * solved_part + narrow::place(r, p),
                 of.solved(h, first + r, i) + half_of * of.solution_low() + piece * rows + p * 8);
    }
  }

  /// `sum += Xᵀ · piece`, Xᵀ the latest or that of the stage.
  KVMELD_DEVICE static void multiply(shared_memory& shared, index_t stage, bool latest,
                                     index_t piece, sums& sum) {
    unrolled<rows / 16>([&](index_t k) {
      matrices left[2];
      unrolled<2>([&](index_t half_of) {
        left[half_of] = latest ? wide::left(shared.latest, half_of * latest_part, warp() / 4 * 16,
                                            piece * (rows / 16) + k)
                               : narrow::left(shared.solved, (stage * 2 + half_of) * solved_part,
                                              warp() / 4 * 16, k);
      });
      unrolled<2>([&](index_t pair) {
        matrices right[2];
        unrolled<2>([&](index_t half_of) {
          right[half_of] = wide::right_of_columns(shared.factor, (stage * 2 + half_of) * part,
                                                  warp() % 4 * 32 + pair * 16, k * 16);
        });
        unrolled<2>([&](index_t n) {
          const unsigned high[2] = {right[0].of[2 * n], right[0].of[2 * n + 1]};
          const unsigned low[2] = {right[1].of[2 * n], right[1].of[2 * n + 1]};
          float(&to)[4] = sum[pair * 2 + n];
          mma_16x8x16<half>(to, left[1].of, high);
          mma_16x8x16<half>(to, left[0].of, low);
          mma_16x8x16<half>(to, left[0].of, high);
        });
      });
    });
  }

  /// `use(where in latest, half, row, pack)` for all of it, eight halfs at a time.
  template <class Use>
  KVMELD_DEVICE static void each_pack(Use use) {
    constexpr index_t packs = tile::side / 8;
    KVMELD_UNROLL
    for (index_t e0 = 0; e0 < 2 * columns * packs; e0 += threads) {
      const index_t e = e0 + thread_index(), half_of = e / (columns * packs);
      const index_t r = e / packs % columns, p = e % packs;
      use(half_of * latest_part + wide::place(r, p), half_of, r, p);
    }
  }
  /// What is left of Yᵀ, less the sums, becomes the latest, which is used up.
  KVMELD_DEVICE void put_rest(shared_memory& shared, sums& sum, index_t h, index_t j,
                              index_t first) const {
    const half* const y = of.numbers(h, of.tiles + first / tile::side, j);
    each_pack([&](index_t at, index_t half_of, index_t r, index_t p) {
      shared.latest.set_vector(
          at, load_16(y + half_of * tile::size + (first % tile::side + r) * tile::side + p * 8));
    });
    sync_block();
    put(shared, sum, [&](index_t at, float x, float y0) {
      const unsigned high = shared.latest.pair(at), low = shared.latest.pair(latest_part + at);
      return pair{to_float(low_of<half>(high)) + to_float(low_of<half>(low)) - x,
                  to_float(high_of<half>(high)) + to_float(high_of<half>(low)) - y0};
    });
    sync_block();
  }
  /// The sums are the solution.
  KVMELD_DEVICE void put_solution(shared_memory& shared, sums& sum, index_t h, index_t j,
                                  index_t first) const {
    const std::ptrdiff_t slots = std::ptrdiff_t{h} * capacity;
    const float scale = of.scale_out[h];
    unrolled<4, 4>([&](index_t n, index_t u) {
      const index_t x = j * tile::side + unknown(n, u), i = first + column(u);
      if (row != nullptr && x < of.unknowns[h] && i < of.dim) {
        out[(slots + row[slots + x]) * of.dim + i] = scale * sum[n][u];
      }
    });
    sync_block();  // the latest is used up
    put(shared, sum, [](index_t, float x, float y) { return pair{x, y}; });
    sync_block();
    each_pack([&](index_t at, index_t half_of, index_t r, index_t p) {
      store_16(of.solved(h, first + r, j) + half_of * of.solution_low() + p * 8,
               shared.latest.vector(at));
    });
  }

  struct pair {
    float x, y;
  };
  /// `of_sums(where, x, y)` of every two sums becomes the latest; the sums are 0 then.
  template <class OfSums>
  KVMELD_DEVICE static void put(shared_memory& shared, sums& sum, OfSums of_sums) {
    unrolled<4>([&](index_t n) {
      KVMELD_UNROLL
      for (index_t u = 0; u < 4; u += 2) {
        const index_t c = unknown(n, u), at = wide::place(column(u), c / 8) + c % 8;
        const pair numbers = of_sums(at, sum[n][u], sum[n][u + 1]);
        const auto a = split_number::of(numbers.x), b = split_number::of(numbers.y);
        shared.latest[at] = a.high, shared.latest[at + 1] = b.high;
        shared.latest[latest_part + at] = a.low, shared.latest[latest_part + at + 1] = b.low;
        sum[n][u] = sum[n][u + 1] = 0;
      }
    });
  }
};

/// `X = PᵀZ` of the dual's Z, a block a tile.
template <index_t Halves>
struct multiply_solution {
  using tile = tile_product<2, Halves>;
  static constexpr index_t threads = tile::threads, resident = 2;
  struct shared_memory {
    typename tile::ring ring;
  };

  ridge_system of;
  const index_t* row;  // [heads, capacity] of each unknown
  index_t capacity;
  float* out;  // [heads, capacity, dim]

  /// Grid: heads, tiles of unknowns, tiles of columns.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = of.active.head(), n = of.unknowns[h];
    const index_t first = block_y() * of.side;
    const index_t columns = block_z() * of.side;
    if (first >= n) {
      return;
    }
    const half* const left = of.row(h, first);
    const half* const right = of.solved(h, columns, 0);
    typename tile::sums sum = {};
    tile::add(
        shared.ring, of.depth / tile::depth, false,
        [&](index_t s, half_rows& a, half_rows& b) {
          a = {left + s * tile::depth, of.depth, of.low()};
          b = {right + s * tile::depth, of.depth, of.solution_low()};
        },
        sum);
    const std::ptrdiff_t slots = std::ptrdiff_t{h} * capacity;
    const float scale = of.scale_out[h];
    unrolled<4>([&](index_t m) {
      KVMELD_UNROLL
      for (index_t i = 0; i < 4; i += 2) {
        const index_t u = first + tile::row(m, i);
        unrolled<4, 2>([&](index_t c, index_t e) {
          const index_t column = columns + tile::column(c, e);
          if (u < n && column < of.dim) {
            out[(slots + row[slots + u]) * of.dim + column] = scale * sum[m][c][i + e];
          }
        });
      }
    });
  }
};

}  // namespace kvmeld::cuda::detail
