// SPDX-License-Identifier: MIT
/// fold: leverage of un-rotated keys, what stands out among a head's slots.
#pragma once

#include "kvmeld/cuda/memory/head_budgets.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/memory/rope_params.cuh"
#include "kvmeld/cuda/policies/fold/covariance.cuh"
#include "kvmeld/cuda/policies/fold/rule.cuh"

namespace kvmeld::cuda::detail {

/// A head's keys as they were before RoPE, as rows of `sum_moments`.
template <class Scalar>
struct unrotated_keys {
  cache_view<Scalar> cache;
  rope_params turn;
  head_budgets limits;
  const index_t* more;  // [heads] 0: leverage pins nothing, and is not wanted; or null

  KVMELD_DEVICE index_t count(index_t h) const { return cache.length[h]; }
  KVMELD_DEVICE bool asks(index_t h) const {
    return limits.of(h).reached(cache.length[h]) && cache.length[h] <= cache.capacity &&
           (more == nullptr || more[h] != 0);
  }
  struct of_head {
    head_rows<Scalar> keys;
    const index_t* position;
    const rope_params& turn;
    index_t dim;

    struct loaded {
      Scalar x, y;
      index_t position;
    };
    template <index_t N>
    KVMELD_DEVICE void load(const index_t (&s)[N], index_t p, loaded (&to)[N]) const {
      const number_pair at = turn.elements(dim, p);
      Scalar* row[N];
      keys.at(s, row);
      unrolled<N>([&](index_t u) {
        to[u] = {row[u][at.i], row[u][at.j < 0 ? at.i : at.j], position[s[u]]};
      });
    }
    KVMELD_DEVICE number_pair number(const loaded& of, index_t p) const {
      number_pair x = turn.elements(dim, p);
      x.x = to_float(of.x), x.y = x.j < 0 ? 0.0F : to_float(of.y);
      return turn.turned(x, p, -of.position);
    }
  };
  KVMELD_DEVICE of_head of(index_t h) const {
    return {cache.keys.of(h), cache.position_of(h), turn, cache.dim};
  }
};

/// What leverage is computed in, and leverage.
struct leverage_scratch {
  moment_scratch moments;  ///< of keys; of queries after that
  split_inverse inverse;
  float* leverage;  ///< [heads, capacity]

  void allocate(workspace_allocator& from, const work_shape& shape) {
    const std::size_t n = shape.all_heads();
    const index_t queries = shape.group * (shape.queries + shape.before);  // of a prompt
    moments.allocate(from, shape.heads, shape.dim,
                     shape.capacity > queries ? shape.capacity : queries);
    inverse.data = from.take<bfloat16>(n * split_float::parts *
                                       static_cast<std::size_t>(split_inverse::size(shape.dim)));
    leverage = from.take<float>(shape.slots());
  }
};

/// Leverage `|L⁻¹ (x − E[x])|²` of un-rotated keys of all slots, or of those that hold one token (0
/// of others). A block splits the keys of `slots` slots; L⁻¹ streams by in pieces of 64 × 64 on and
/// below its diagonal, two in turn. Warps share the slots, 16 each, and a piece's rows.
template <class Scalar, index_t Depth>
struct measure_leverage {
  static constexpr index_t threads = 256, resident = 2;
  static constexpr index_t slots = 8192 / Depth, side = 64;
  static constexpr index_t lanes = Depth / 2, at_once = threads / lanes;
  static constexpr index_t sharing = threads / 32 / (slots / 16);  // warps
  static constexpr index_t own = side / sharing / 16;              // tiles of a warp, of 16 rows
  using keys = split_tile<slots, Depth>;
  using piece = split_tile<side, side>;
  struct shared_memory {
    shared_array<bfloat16, keys::size> x;
    shared_array<bfloat16, 2 * piece::size> inverse;
    shared_array<float, sharing * slots> square;
  };

  unrotated_keys<Scalar> of;
  state_view state;
  bool single;             // only slots that hold one token
  const index_t* planned;  // [heads]
  const float* mean;       // [heads, dim]
  split_inverse inverse;
  float* leverage;  // [heads, capacity]

  /// Grid: heads, stretches of `slots`.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const auto& cache = of.cache;
    const index_t h = cache.head(), n = cache.length[h], dim = cache.dim;
    const index_t s0 = block_y() * slots;
    if (planned[h] < 0 || s0 >= n) {
      return;
    }
    const index_t pieces = split_inverse::depth_of(dim) / side;  // of a row
    load(shared, h, 0, 0, 0);
    if (dim < Depth) {  // behind a row there are zeros
      for (index_t e = thread_index() * 8; e < keys::size; e += threads * 8) {
        shared.x.set_vector(e, {});
      }
      sync_block();
    }
    if (const index_t p = thread_index() % lanes; p < rope_params::pairs(dim)) {
      const auto rows = of.of(h);
      number_pair centre = of.turn.elements(dim, p);
      centre.x = mean[std::ptrdiff_t{h} * dim + centre.i];
      centre.y = centre.j < 0 ? 0.0F : mean[std::ptrdiff_t{h} * dim + centre.j];
      constexpr index_t many = 8;
      KVMELD_ROLLED
      for (index_t r0 = thread_index() / lanes; r0 < slots; r0 += many * at_once) {
        index_t s[many];
        typename unrotated_keys<Scalar>::of_head::loaded next[many];  // all in flight at once
        unrolled<many>(
            [&](index_t u) { s[u] = s0 + r0 + u * at_once < n ? s0 + r0 + u * at_once : s0; });
        rows.load(s, p, next);
        unrolled<many>([&](index_t u) {
          number_pair x = rows.number(next[u], p);
          x.x -= centre.x, x.y -= centre.y;
          x.each([&](index_t i, float number) {
            keys::put(shared.x, 0, r0 + u * at_once, i, number);
          });
        });
      }
    }
    float y[own][2][4] = {}, square[2] = {};
    index_t stage = 0;
    KVMELD_ROLLED
    for (index_t b = 0; b < pieces; ++b) {
      KVMELD_ROLLED
      for (index_t j = 0; j <= b; ++j) {
        wait_async<0>();
        sync_block();  // this piece is there, and the one before it used up
        const bool last = j == b;
        if (!last || b + 1 < pieces) {
          load(shared, h, last ? b + 1 : b, last ? 0 : j + 1, stage ^ 1);
        }
        multiply(shared, j, stage * piece::size, last, y);
        stage ^= 1;
      }
      unrolled<own, 2, 4>([&](index_t t, index_t e, index_t u) {
        square[u / 2] += y[t][e][u] * y[t][e][u];
        y[t][e][u] = 0;
      });
    }
    const index_t part = warp() % sharing, row = warp() / sharing * 16 + lane() / 4;
    unrolled<2>([&](index_t k) {
      const float all = reduce_sum(square[k], 4);
      if (lane() % 4 == 0) {
        shared.square[part * slots + row + 8 * k] = all;
      }
    });
    sync_block();
    for (index_t r = thread_index(); r < slots && s0 + r < n; r += threads) {
      float sum = 0;
      unrolled<sharing>([&](index_t k) { sum += shared.square[k * slots + r]; });
      const bool is = !single || state.column(fold_rule::tokens, h)[s0 + r] == 1.0F;
      leverage[cache.slot(h, s0 + r)] = is ? sum : 0.0F;
    }
  }

 private:
  /// Starts to copy piece `(b, j)` of L⁻¹.
  KVMELD_DEVICE void load(shared_memory& shared, index_t h, index_t b, index_t j,
                          index_t stage) const {
    const index_t dim = of.cache.dim, depth = split_inverse::depth_of(dim);
    constexpr index_t packs = side / 8;
    const bfloat16* const from = inverse.of(h, dim) + std::ptrdiff_t{b} * side * depth + j * side;
    unrolled<piece::parts>([&](index_t part) {
      KVMELD_UNROLL
      for (index_t e = 0; e < side * packs; e += threads) {
        const index_t r = (e + thread_index()) / packs, p = (e + thread_index()) % packs;
        copy_async(shared.inverse,
                   stage * piece::size + part * piece::part + piece::tile::place(r, p),
                   from + part * split_inverse::size(dim) + std::ptrdiff_t{r} * depth + p * 8);
      }
    });
    commit_async();
  }
  /// Adds the products of keys' columns `64 j ...` with a piece; of one on the diagonal those that
  /// are not 0. Of its four tiles of rows a warp has the i-th and the i-th last, or one.
  KVMELD_DEVICE static void multiply(const shared_memory& shared, index_t j, index_t at,
                                     bool diagonal, float (&y)[own][2][4]) {
    const index_t row = warp() / sharing * 16, part_of_tiles = warp() % sharing;
    KVMELD_ROLLED
    for (index_t k = 0; k < side / 16; ++k) {
      split_matrices left;
      unrolled<keys::parts>([&](index_t part) {
        left.of[part] = keys::tile::left(shared.x, part * keys::part, row, j * (side / 16) + k);
      });
      KVMELD_UNROLL
      for (index_t t = 0; t < own; ++t) {
        const index_t tile =
            t % 2 == 0 ? t * sharing + part_of_tiles : (t + 1) * sharing - 1 - part_of_tiles;
        if (diagonal && k > tile) {
          continue;
        }
        split_matrices right;
        unrolled<piece::parts>([&](index_t part) {
          right.of[part] =
              piece::tile::right(shared.inverse, at + part * piece::part, tile * 16, k);
        });
        multiply_split(left, right, y[t]);
      }
    }
  }
};

/// `leverage [heads, capacity]` of the heads that are brought back to their budgets and want it
/// (`more`, if there is any), which `planned` then says. Four launches.
template <class Scalar>
void leverage_of_keys(const cache_view<Scalar>& cache, const state_view& state,
                      const fold_rule& rule, const head_budgets& limits, bool single,
                      const index_t* more, index_t* planned, const leverage_scratch& work,
                      stream stream) {
  const unrotated_keys<Scalar> keys{cache, rule.turn, limits, more};
  covariance_of<true>(cache, keys, cache.capacity, planned, 1, 0, work.moments, stream);
  with_depth<128, 256>(cache.dim, [&](auto depth) {
    launch(
        invert_covariance<Scalar, decltype(depth)::value>{cache, planned, work.moments.covariance,
                                                          work.inverse, rule.leverage_ridge},
        {cache.blocks()}, stream);
  });
  with_depth<64, 128, 256>(cache.dim, [&](auto depth) {
    using leverage = measure_leverage<Scalar, decltype(depth)::value>;
    launch(leverage{keys, state, single, planned, work.moments.mean, work.inverse, work.leverage},
           {cache.blocks(), blocks_of(cache.capacity, leverage::slots)}, stream);
  });
}

}  // namespace kvmeld::cuda::detail
