// SPDX-License-Identifier: MIT
/// fold after a prompt: slots as points of the space that its reference queries see.
#pragma once

#include <type_traits>  // std::is_same_v

#include "kvmeld/cuda/memory/tile.cuh"
#include "kvmeld/cuda/search/points.cuh"

namespace kvmeld::cuda::detail {

/// What makes a slot a point: `[scale · (k − mean k) L | v / mean‖v‖]`, `L Lᵀ` the queries'
/// covariance and 10⁻³ on its diagonal.
struct point_space {
  float* metric;   ///< [heads, dim, dim] 10³ C + I; is overwritten
  void* split;     ///< [heads, parts, dim, dim] scale · L, a sum of `split_factor::parts` scalars
  float* offset;   ///< [heads, dim] the mean key times it
  float* inverse;  ///< [heads] 1 / mean‖v‖
  float* weight;   ///< [heads, capacity] of a slot
};

/// Over stretches of slots, the last of which may be shorter: sums of keys, and of values' norms.
struct space_sums {
  static constexpr index_t slots = 128;

  float *key, *norm;  ///< [heads, stretches, dim], [heads, stretches]
};

/// L as what tensor cores multiply keys by: 22 bits of it as halfs, 24 as bfloat16; floats are
/// multiplied as they are.
template <class Scalar>
struct split_factor {
  static constexpr index_t parts = sizeof(Scalar) == 4 ? 1 : std::is_same_v<Scalar, half> ? 2 : 3;
  static constexpr index_t most_bytes = 6;  ///< of a number, whatever the scalar

  Scalar* data;
  index_t dim;

  KVMELD_DEVICE Scalar* column(index_t h, index_t part, index_t j) const {
    return data + ((std::ptrdiff_t{h} * parts + part) * dim + j) * dim;
  }
};

/// Slots as points, and their squares. A block makes `slots` of them, some columns of L at a time:
/// products of 16-bit rows on tensor cores, summed in float.
template <class Scalar, index_t Depth>
struct make_points {
  using shape = tile_shape<Scalar, Depth>;
  using factor = split_factor<Scalar>;
  static constexpr index_t threads = shape::threads, slots = shape::rows, some = shape::columns;
  static constexpr index_t packs = some / 8, own = slots * packs / threads;
  static constexpr index_t width = vector_16<Scalar>::size;
  struct shared_memory {
    typename shape::row_array keys;
    typename shape::column_array columns;
    shared_array<half, slots * some> halves;
  };

  cache_view<Scalar> cache;
  const index_t* planned;  // [heads]
  point_space space;
  point_rows to;
  bool aligned;

  /// Grid: heads, stretches of `slots`.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), dim = cache.dim;
    const index_t s0 = block_y() * slots, n = cache.length[h];
    if (planned[h] < 0 || s0 >= n) {
      return;
    }
    const auto keys = cache.keys.of(h), values = cache.values.of(h);
    const factor l{static_cast<Scalar*>(space.split), dim};
    const float* const offset = space.offset + std::ptrdiff_t{h} * dim;
    const index_t of_keys = to.values_at(dim);
    shape::template load<slots>(
        shared.keys, [&](index_t r) { return s0 + r < n ? keys.at(s0 + r) : nullptr; }, keys.data,
        dim, aligned);
    float square[own] = {};
    for (index_t j0 = 0; j0 < of_keys; j0 += some) {
      typename shape::products y;
      shape::clear(y);
      KVMELD_ROLLED
      for (index_t part = 0; part < factor::parts; ++part) {
        shape::template load<some>(
            shared.columns,
            [&](index_t c) { return j0 + c < dim ? l.column(h, part, j0 + c) : nullptr; }, l.data,
            dim, dim % width == 0);
        commit_async();
        wait_async<0>();
        sync_block();
        shape::accumulate(shared.keys, shared.columns, dim, y);
        sync_block();  // the columns are used up
      }
      unrolled<shape::column_tiles, 4>([&](index_t c, index_t i) {
        const index_t column = shape::column(c, i), j = j0 + column;
        const float centre = j < dim ? offset[j] : 0.0F;
        unrolled<shape::row_tiles>(
            [&](index_t m) { put(shared, shape::row(m, i), column, y[m][c][i] - centre); });
      });
      store(shared, h, s0, n, j0, of_keys, square);
    }
    const float inverse = space.inverse[h];
    for (index_t j0 = of_keys; j0 < to.depth; j0 += some) {
      for (index_t e = thread_index(); e < slots * some / width; e += threads) {
        const index_t r = e / (some / width), i = e % (some / width) * width;
        const bool is = s0 + r < n;
        auto x = load_row(values.at(is ? s0 + r : s0), j0 - of_keys + i, is ? dim : 0, aligned);
        unrolled<width>([&](index_t j) { put(shared, r, i + j, to_float(x[j]) * inverse); });
      }
      store(shared, h, s0, n, j0, to.depth, square);
    }
    unrolled<own>([&](index_t u) {
      const index_t r = (u * threads + thread_index()) / packs;
      square[u] = reduce_sum(square[u], packs);
      if (thread_index() % packs == 0 && s0 + r < n) {
        to.square[to.at(h, s0 + r)] = square[u];
      }
    });
  }

 private:
  KVMELD_DEVICE static void put(shared_memory& shared, index_t r, index_t column, float x) {
    constexpr float most = 65504;  // of halfs
    shared.halves[r * some + column] = from_float<half>(x > most ? most : x < -most ? -most : x);
  }
  /// Stores the halves as columns `j0 ...` of the rows, before `end`; adds this thread's squares.
  KVMELD_DEVICE void store(shared_memory& shared, index_t h, index_t s0, index_t n, index_t j0,
                           index_t end, float (&square)[own]) const {
    sync_block();
    unrolled<own>([&](index_t u) {
      const index_t e = u * threads + thread_index(), r = e / packs, i = e % packs * 8;
      const auto x = shared.halves.vector(r * some + i);
      if (s0 + r < n && j0 + i < end) {
        store_16(to.row(h, s0 + r) + j0 + i, x);
      }
      unrolled<8>([&](index_t j) { square[u] += to_float(x[j]) * to_float(x[j]); });
    });
    sync_block();
  }
};

}  // namespace kvmeld::cuda::detail
