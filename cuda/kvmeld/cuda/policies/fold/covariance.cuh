// SPDX-License-Identifier: MIT
/// fold: the mean and the covariance of a head's keys or queries, and the inverse of its Cholesky
/// factor, as tensor cores multiply by it.
#pragma once

#include <type_traits>  // std::conditional_t

#include "kvmeld/cuda/device/block_collectives.cuh"
#include "kvmeld/cuda/device/split_rows.cuh"
#include "kvmeld/cuda/device/tile_cholesky.cuh"
#include "kvmeld/cuda/memory/view.cuh"
#include "kvmeld/cuda/policies/fold/moments.cuh"

namespace kvmeld::cuda::detail {

/// Mean and `scale · (covariance + more · I)`, of the sums of all parts: `mean` has what was
/// subtracted in them. A block has 8 rows, a warp one of them.
template <class Rows>
struct make_covariance {
  static constexpr index_t threads = 256, rows_of_block = threads / 32;
  struct shared_memory {
    shared_array<float, max_dim> mean;  // less what was subtracted
  };

  active_heads active;
  index_t dim;
  Rows rows;
  const index_t* planned;  // [heads]
  index_t parts;
  float scale, more;
  moment_scratch of;

  /// Grid: heads, stretches of `rows_of_block`.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = active.head(), n = rows.count(h);
    const std::ptrdiff_t size = moment_sums::size(dim);
    if (planned[h] < 0) {
      return;
    }
    const float* const first = of.sums + std::ptrdiff_t{h} * parts * size;
    const float share = 1.0F / static_cast<float>(n);
    const index_t have = moment_parts(n);
    const auto mean_of_parts = [&](const float* x) {
      float sum = 0;
      for (index_t k = 0; k < have; ++k) {
        sum += x[k * size];
      }
      return share * sum;
    };
    for (index_t i = thread_index(); i < dim; i += threads) {
      shared.mean[i] = mean_of_parts(first + i);
    }
    sync_block();
    if (block_index().y == 0) {
      for (index_t k = thread_index(); k < dim; k += threads) {
        of.mean[std::ptrdiff_t{h} * dim + k] += shared.mean[k];
      }
    }
    const index_t i = block_y() * rows_of_block + warp();
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
  const index_t parts = moment_parts(most_rows);
  const active_heads active{cache.active};
  with_depth<64, 128, 256>(cache.dim, [&](auto depth) {
    launch(sum_moments<Rows, decltype(depth)::value>{active, cache.dim, rows,
                                                     Plans ? planned : nullptr, work},
           {heads, blocks_of(parts)}, stream);
  });
  using covariance = make_covariance<Rows>;
  constexpr index_t stretch = covariance::rows_of_block;
  launch(covariance{active, cache.dim, rows, planned, parts, scale, more, work},
         {heads, blocks_of(cache.dim, stretch)}, stream);
}

/// The inverse of a factor, as `measure_leverage` multiplies by it: square, zeros above the
/// diagonal and up to a multiple of 64.
struct split_inverse {
  bfloat16* data;  ///< [heads, split_float::parts, depth_of(dim), depth_of(dim)]

  KVMELD_HD static index_t depth_of(index_t dim) { return (dim + 63) / 64 * 64; }
  KVMELD_HD static std::ptrdiff_t size(index_t dim) {
    return std::ptrdiff_t{depth_of(dim)} * depth_of(dim);
  }
  /// The first part's.
  KVMELD_DEVICE bfloat16* of(index_t h, index_t dim) const {
    return data + h * split_float::parts * size(dim);
  }
};

/// `L⁻¹` of `L Lᵀ = C + λ I`, λ = `ridge` times the mean of C's diagonal: a block a head. Up to 128
/// dims `C/λ + I` is factored in shared memory, none of whose eigenvalues is below 1.
template <class Scalar, index_t Depth>
struct invert_covariance {
  static constexpr bool tiled = Depth == tile_cholesky::side;
  static constexpr index_t threads = 256;
  struct of_tile {
    tile_cholesky::array a;
    of_warps<float, threads> sum;
  };
  struct of_matrix {
    factor_memory factor;
    of_warps<float, threads> sum;
  };
  using shared_memory = std::conditional_t<tiled, of_tile, of_matrix>;

  cache_view<Scalar> cache;
  const index_t* planned;  // [heads]
  float* covariance;       // [heads, dim, dim]; above 128 dims overwritten
  split_inverse inverse;
  float ridge;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), dim = cache.dim;
    if (planned[h] < 0) {
      return;
    }
    float* const c = covariance + std::ptrdiff_t{h} * dim * dim;
    const float trace =
        block_total(shared.sum, dim, [&](index_t i) { return c[std::ptrdiff_t{i} * dim + i]; });
    float lambda = ridge * (trace / static_cast<float>(dim));
    lambda = lambda > 1e-20F ? lambda : 1e-20F;  // all keys alike: leverage is 0, not 0/0
    if constexpr (tiled) {
      constexpr index_t side = tile_cholesky::side;
      for (index_t e = thread_index(); e < side * side; e += threads) {
        const index_t i = e / side, j = e % side;
        const float x = i < dim && j < dim ? c[std::ptrdiff_t{i} * dim + j] / lambda : 0.0F;
        shared.a[tile_cholesky::at(i, j)] = i == j ? x + 1 : x;
      }
      tile_cholesky::invert_factor(shared.a);
      const float scale = 1 / square_root(lambda);
      store(h, [&](index_t i, index_t j) { return scale * shared.a[tile_cholesky::at(i, j)]; });
    } else {
      for (index_t i = thread_index(); i < dim; i += threads) {
        c[std::ptrdiff_t{i} * dim + i] += lambda;
      }
      factor_inverse<threads>(shared.factor, c, dim);
      store(h, [&](index_t i, index_t j) { return c[std::ptrdiff_t{j} * dim + i]; });
    }
  }

 private:
  /// `at(i, j)` of the inverse, on and below its diagonal.
  template <class At>
  KVMELD_DEVICE void store(index_t h, At at) const {
    const index_t dim = cache.dim, depth = split_inverse::depth_of(dim);
    bfloat16* const to = inverse.of(h, dim);
    for (index_t e = thread_index() * 8; e < depth * depth; e += threads * 8) {
      const index_t i = e / depth, j = e % depth;
      float x[8];
      unrolled<8>([&](index_t u) { x[u] = i < dim && j + u <= i ? at(i, j + u) : 0.0F; });
      store_split(x, to + e, split_inverse::size(dim));
    }
  }
};

}  // namespace kvmeld::cuda::detail
