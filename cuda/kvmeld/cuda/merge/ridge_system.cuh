// SPDX-License-Identifier: MIT
/// A ridge's equations as tiles: where they lie, and how they are scaled.
#pragma once

#include "kvmeld/cuda/device/block_collectives.cuh"
#include "kvmeld/cuda/device/tile_cholesky.cuh"
#include "kvmeld/cuda/device/tile_product.cuh"
#include "kvmeld/cuda/memory/view.cuh"
#include "kvmeld/cuda/memory/workspace.cuh"

namespace kvmeld::cuda::detail {

/// Of every head `(PᵀP + λI) X = PᵀY`, `P [queries, n]`, `Y [queries, dim]`, n the head's own.
///
/// `Pᵀ`, then `Yᵀ`, lie as rows of halfs, zeros up to whole tiles of 128 and in queries that there
/// are not. Of their products the lower triangle of tiles 128 × 128 is kept, and below it the rows
/// of tiles `PᵀY` transposed, which go through the factorization as further rows: that is the
/// forward substitution. Where queries are fewer by tiles, the dual is solved, `X = Pᵀ (PPᵀ + λI)⁻¹
/// Y`: the tiles are of PPᵀ, and below it of `Yᵀ`. Everything is divided by λ: the factor's
/// diagonal is 1 or more and, as `λ ≥ ridge · trace`, at most the root of 1 + 1 / ridge. `PᵀY` has
/// a scale of its own, for which none of what becomes of it leaves the range of halfs. So numbers
/// of the factor can be split ones
/// (`split_number`), and a solution errs by a few 1e-6.
struct ridge_system {
  using tile = tile_product<2>;
  static constexpr index_t side = tile::side;
  static constexpr float p_scale = 32768, most = 16384;  ///< of halfs: of P, which is 1 at most

  active_heads active;
  const index_t* unknowns;   ///< [heads] n
  half* rows;                ///< [heads, halves, stored_rows(), depth]
  float* data;               ///< [heads, all_tiles(), 128 · 128] sums, then split numbers
  half* inverse;             ///< [heads, tiles, 2, 128 · 128] of the factor's diagonal tiles
  half* solution;            ///< [heads, 2, dim_tiles · 128, tiles · 128] Xᵀ, or the dual's
  float *scale, *scale_out;  ///< [heads, 2] of the sums: of PᵀP, of PᵀY; [heads] of the solution
  index_t tiles;             ///< of 128 unknowns, as many as any head has; or of 128 queries
  index_t unknown_tiles;     ///< of 128 unknowns
  bool dual;
  index_t dim, dim_tiles, queries, depth;  ///< depth: queries, up to a multiple of 64, or of 128
  index_t halves;                          ///< of a number of P and Y: 1 or 2

  KVMELD_HD index_t row_tiles() const { return tiles + dim_tiles; }
  KVMELD_HD index_t stored_rows() const { return (unknown_tiles + (dual ? 0 : dim_tiles)) * side; }
  KVMELD_HD index_t all_tiles() const { return tiles * (tiles + 1) / 2 + dim_tiles * tiles; }
  /// Of one head: unknowns up to whole tiles, and tiles of the matrix.
  KVMELD_DEVICE index_t unknown_rows(index_t h) const {
    return (unknowns[h] + side - 1) / side * side;
  }
  KVMELD_DEVICE index_t tiles_of(index_t h) const {
    return dual && unknowns[h] > 0 ? tiles : unknown_rows(h) / side;
  }
  /// Row tile `i` from `tiles` on is one of PᵀY's.
  KVMELD_DEVICE float* sums(index_t h, index_t i, index_t j) const {
    const index_t at =
        i < tiles ? i * (i + 1) / 2 + j : tiles * (tiles + 1) / 2 + (i - tiles) * tiles + j;
    return data + (std::ptrdiff_t{h} * all_tiles() + at) * tile::size;
  }
  KVMELD_DEVICE half* numbers(index_t h, index_t i, index_t j) const {
    return reinterpret_cast<half*>(sums(h, i, j));
  }
  KVMELD_DEVICE half* inverse_of(index_t h, index_t j) const {
    return inverse + (std::ptrdiff_t{h} * tiles + j) * 2 * tile::size;
  }
  /// Numbers from the first to the second halfs of rows.
  KVMELD_HD std::ptrdiff_t low() const { return std::ptrdiff_t{stored_rows()} * depth; }
  KVMELD_HD half* row(index_t h, index_t r) const {
    return rows + std::ptrdiff_t{h} * halves * low() + std::ptrdiff_t{r} * depth;
  }
  /// Of Xᵀ: unknown `j · 128` of row `i`.
  KVMELD_DEVICE half* solved(index_t h, index_t i, index_t j) const {
    return solution + std::ptrdiff_t{h} * 2 * solution_low() + std::ptrdiff_t{i} * tiles * side +
           j * side;
  }
  KVMELD_HD std::ptrdiff_t solution_low() const {
    return std::ptrdiff_t{dim_tiles} * side * tiles * side;
  }
};

/// Eight numbers as halfs: one or two each, at `to` and `low` further on.
template <index_t Halves>
KVMELD_DEVICE void store_halves(const float (&x)[8], half* to, std::ptrdiff_t low) {
  vector_16<half> first, second;
  unrolled<8>([&](index_t u) {
    const auto y = split_number::of(x[u]);
    first[u] = y.high, second[u] = y.low;
  });
  store_16(to, first);
  if constexpr (Halves == 2) {
    store_16(to + low, second);
  }
}

/// The head's scales, and, but for the dual, `Y [queries, dim]` as rows of the system. A number of
/// every part of a head: `squares` of P's numbers, and the `largest` of Y's.
template <index_t Halves>
struct pack_outputs {
  static constexpr index_t threads = 256, queries = 64, some = 32;
  static constexpr index_t pitch = some + 2;  // 8 queries further on are 16 banks
  struct shared_memory {
    shared_array<float, queries * pitch> y;
    of_warps<float, threads> number;
  };

  ridge_system of;
  const float* y;                  // [heads, queries, dim]
  const float *squares, *largest;  // [heads, parts]
  index_t parts;
  float ridge;

  /// Grid: heads, tiles of queries.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = of.active.head();
    if (of.unknowns[h] == 0) {
      return;
    }
    float sum = 0, most = 0;
    for (index_t i = thread_index(); i < parts; i += threads) {
      const float x = largest[std::ptrdiff_t{h} * parts + i];
      sum += squares[std::ptrdiff_t{h} * parts + i], most = x > most ? x : most;
    }
    constexpr float lost = 8.0F / (1 << 23);  // 8ε, as in `ridge_values`
    const float relative = ridge * block_sum(shared.number, sum),
                least = static_cast<float>(of.queries) * lost * lost,
                lambda = relative > least ? relative : least;
    most = block_max(shared.number, most);
    const float to_half = power_of_two(most);
    if (block_index().y == 0 && thread_index() == 0) {
      set_scales(h, lambda, most, to_half);
    }
    if (of.dual) {
      return;
    }
    const index_t q0 = block_y() * queries;
    const index_t pack = warp() / 2 * 2 + lane() % 2, d = warp() % 2 * 16 + lane() / 2;
    for (index_t d0 = 0; d0 < of.dim_tiles * of.side; d0 += some) {
      sync_block();  // the last are used up
      for (index_t e = thread_index(); e < queries * some; e += threads) {
        const index_t q = q0 + e / some, i = d0 + e % some;
        shared.y[e / some * pitch + e % some] =
            q < of.queries && i < of.dim
                ? to_half * y[(std::ptrdiff_t{h} * of.queries + q) * of.dim + i]
                : 0.0F;
      }
      sync_block();
      float x[8];
      unrolled<8>([&](index_t u) { x[u] = shared.y[(pack * 8 + u) * pitch + d]; });
      store_halves<Halves>(x, of.row(h, of.unknown_tiles * of.side + d0 + d) + q0 + pack * 8,
                           of.low());
    }
  }

 private:
  /// By which numbers up to `most` stay below `ridge_system::most`.
  KVMELD_DEVICE static float power_of_two(float most) {
    float x = 1;
    while (most * x >= ridge_system::most) {
      x *= 0.5F;
    }
    while (most > 0 && most * x < 0.5F * ridge_system::most) {
      x *= 2;
    }
    return x;
  }
  /// With singular values s of P, `PᵀY` divided by λ and by the factor has numbers up to
  /// `max s / (s² + λ)½ · |Y| / λ½`, of the dual `|Y| / λ`; before, they are up to the factor's
  /// largest, (1 + 1 / ridge)½, more.
  KVMELD_DEVICE void set_scales(index_t h, float lambda, float largest_y, float to_half) const {
    const bool is = largest_y > 0;
    const float root = square_root(lambda);
    const float most =
        square_root(1 + 1 / ridge) * square_root(static_cast<float>(of.queries)) * largest_y;
    const float per = is ? ridge_system::most / most : 0.0F;  // times λ, or its root
    constexpr float p = ridge_system::p_scale;
    of.scale[2 * h] = 1 / (p * p * lambda);
    of.scale[2 * h + 1] = !is || of.dual ? per : per / (p * to_half * root);
    of.scale_out[h] = !is ? 0.0F : of.dual ? 1 / (p * per * lambda) : 1 / (per * root);
  }
};

/// Room for `heads` systems of up to `unknowns` each. `scratch` floats are to have room in `data`,
/// which nothing uses before the products.
inline ridge_system allocate_ridge(workspace_allocator& from, std::size_t heads, index_t unknowns,
                                   index_t dim, index_t queries, index_t halves,
                                   std::size_t scratch) {
  constexpr index_t side = ridge_system::side;
  ridge_system s{};
  const index_t query_tiles = (queries + side - 1) / side;
  s.unknown_tiles = (unknowns + side - 1) / side, s.dim_tiles = (dim + side - 1) / side;
  s.dual = query_tiles < s.unknown_tiles, s.tiles = s.dual ? query_tiles : s.unknown_tiles;
  s.dim = dim, s.queries = queries, s.halves = halves;
  s.depth = s.dual ? query_tiles * side : (queries + 63) / 64 * 64;
  const auto tile = static_cast<std::size_t>(ridge_system::tile::size),
             data = static_cast<std::size_t>(s.all_tiles()) * tile * heads;
  s.rows = from.take<half>(heads * static_cast<std::size_t>(halves * s.low()));
  s.data = from.take<float>(data > scratch ? data : scratch);
  s.inverse = from.take<half>(heads * static_cast<std::size_t>(s.tiles) * 2 * tile);
  s.solution = from.take<half>(heads * static_cast<std::size_t>(2 * s.solution_low()));
  s.scale = from.take<float>(2 * heads), s.scale_out = from.take<float>(heads);
  return s;
}

}  // namespace kvmeld::cuda::detail
