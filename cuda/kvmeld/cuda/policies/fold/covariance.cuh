// SPDX-License-Identifier: MIT
/// fold: the mean and the covariance of a head's keys or queries.
#pragma once

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

}  // namespace kvmeld::cuda::detail
