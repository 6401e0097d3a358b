// SPDX-License-Identifier: MIT
/// fold after a prompt: the space that its reference queries measure slots in.
#pragma once

#include <type_traits>  // std::conditional_t

#include "kvmeld/cuda/device/tile_cholesky.cuh"
#include "kvmeld/cuda/policies/fold/covariance.cuh"
#include "kvmeld/cuda/policies/fold/points.cuh"
#include "kvmeld/cuda/policies/fold/reference.cuh"

namespace kvmeld::cuda::detail {

/// Reference queries of a head's whole group, as rows of `sum_moments`.
template <class Scalar>
struct reference_rows {
  chosen_rows<Scalar> queries;
  index_t group, dim;

  KVMELD_DEVICE index_t count(index_t) const { return queries.count * group; }
  KVMELD_DEVICE bool asks(index_t h) const { return queries.asks(h); }
  struct of_head {
    const reference_rows& all;
    index_t head;

    struct loaded {
      Scalar x, y;
    };
    template <index_t N>
    KVMELD_DEVICE void load(const index_t (&e)[N], index_t p, loaded (&to)[N]) const {
      const index_t count = all.queries.count, i = 2 * p;
      unrolled<N>([&](index_t u) {
        const Scalar* const row = all.queries.at(head, e[u] / count, e[u] % count);
        to[u] = {row[i], row[i + 1 < all.dim ? i + 1 : i]};
      });
    }
    KVMELD_DEVICE number_pair number(const loaded& of, index_t p) const {
      const bool both = 2 * p + 1 < all.dim;
      return {2 * p, both ? 2 * p + 1 : -1, to_float(of.x), both ? to_float(of.y) : 0.0F};
    }
  };
  KVMELD_DEVICE of_head of(index_t h) const { return {*this, h}; }
};

/// Sums over stretches of slots: of keys, and of the values' norms.
template <class Scalar>
struct sum_slots {
  static constexpr index_t threads = 256, warps = threads / 32, slots = space_sums::slots;
  struct shared_memory {
    shared_array<float, warps * max_dim> key;
    of_warps<float, threads> norm;
  };

  cache_view<Scalar> cache;
  const index_t* planned;  // [heads]
  space_sums to;

  /// Grid: heads, stretches of `slots`.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), stretch = block_y();
    const index_t s0 = stretch * slots, n = cache.length[h];
    if (planned[h] < 0) {
      return;
    }
    const auto keys = cache.keys.of(h), values = cache.values.of(h);
    float sum[max_dim / 32] = {}, norms = 0;
    for (index_t s = s0 + warp(); s < s0 + slots && s < n; s += warps) {
      const Scalar *const k = keys.at(s), *const v = values.at(s);
      float square = 0;
      unrolled<max_dim / 32>([&](index_t u) {
        if (const index_t i = u * 32 + lane(); i < cache.dim) {
          const float x = to_float(v[i]);
          sum[u] += to_float(k[i]), square += x * x;
        }
      });
      norms += square_root(reduce_sum(square));
    }
    unrolled<max_dim / 32>(
        [&](index_t u) { shared.key[warp() * max_dim + u * 32 + lane()] = sum[u]; });
    norms = block_sum(shared.norm, lane() == 0 ? norms : 0.0F);
    const std::ptrdiff_t at = std::ptrdiff_t{h} * grid().y + stretch;
    for (index_t i = thread_index(); i < cache.dim; i += threads) {
      float x = 0;
      for (index_t w = 0; w < warps; ++w) {
        x += shared.key[w * max_dim + i];
      }
      to.key[at * cache.dim + i] = x;
    }
    if (thread_index() == 0) {
      to.norm[at] = norms;
    }
  }
};

/// How much apart keys are to the queries is `scale² (C + 10⁻³ I)`, C their covariance. Its
/// Cholesky factor L, with zeros above the diagonal, in parts; the mean key times it; what values
/// are times. With nothing pinned the heaviest slot is the first seed. A block a head; up to 128
/// dims the factor is in shared memory.
template <class Scalar, index_t Depth>
struct factor_space {
  static constexpr bool tiled = Depth == tile_cholesky::side;
  static constexpr index_t threads = max_dim, resident = 1;
  static constexpr float least = 1e-3F;
  struct of_tile {
    tile_cholesky::array a;
    tile_cholesky::diagonal_array diagonal;
    shared_array<float, max_dim> mean;
  };
  struct of_matrix {
    factor_memory factor;
    shared_array<float, max_dim> mean;
  };
  using shared_memory = std::conditional_t<tiled, of_tile, of_matrix>;

  cache_view<Scalar> cache;
  const index_t* planned;  // [heads]
  space_sums sums;
  index_t stretches;
  const float* mass;  // [heads, capacity]
  float floor;
  point_space to;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), n = cache.length[h], dim = cache.dim, i = thread_index();
    if (planned[h] < 0) {
      return;
    }
    const auto count = static_cast<float>(n);
    const std::ptrdiff_t at = std::ptrdiff_t{h} * stretches;
    float sum = 0;
    for (index_t s = 0; s < stretches && i < dim; ++s) {
      sum += sums.key[(at + s) * dim + i];
    }
    shared.mean[i] = sum / count;
    if (i == 0) {
      float norms = 0;
      for (index_t s = 0; s < stretches; ++s) {
        norms += sums.norm[at + s];
      }
      const float mean = norms / count;
      to.inverse[h] = 1.0F / (mean > 1e-20F ? mean : 1e-20F);
    }
    float* const c = to.metric + std::ptrdiff_t{h} * dim * dim;
    const float unit = cache.scale * square_root(least);  // of what is factored
    if constexpr (tiled) {
      constexpr index_t side = tile_cholesky::side;
      for (index_t e = i; e < side * side; e += threads) {
        const index_t row = e / side, column = e % side;
        shared.a[tile_cholesky::at(row, column)] = row < dim && column < dim
                                                       ? c[std::ptrdiff_t{row} * dim + column]
                                                   : row == column ? 1.0F
                                                                   : 0.0F;
      }
      tile_cholesky::factor(shared.a, shared.diagonal);
      store(shared, h, [&](index_t row, index_t column) {
        return unit * shared.a[tile_cholesky::at(row, column)];
      });
    } else {
      factor_lower<threads>(shared.factor, c, dim);  // its diagonal is inverse
      store(shared, h, [&](index_t row, index_t column) {
        const float x = c[std::ptrdiff_t{column} * dim + row];
        return unit * (row == column ? 1.0F / x : x);
      });
    }
    for (index_t s = i; s < n; s += threads) {
      to.weight[cache.slot(h, s)] = mass[cache.slot(h, s)] + floor / count;
    }
  }

 private:
  /// `l(row, column)`, on and below the diagonal.
  template <class Factor>
  KVMELD_DEVICE void store(shared_memory& shared, index_t h, Factor l) const {
    const index_t dim = cache.dim, i = thread_index();
    const split_factor<Scalar> split{static_cast<Scalar*>(to.split), dim};
    for (index_t e = i; e < dim * dim; e += threads) {
      const index_t row = e % dim, column = e / dim;
      float x = row < column ? 0.0F : l(row, column);
      unrolled<split_factor<Scalar>::parts>([&](index_t part) {
        const auto high = from_float<Scalar>(x);
        split.column(h, part, column)[row] = high;
        x -= to_float(high);
      });
    }
    if (i < dim) {
      float offset = 0;
      for (index_t row = i; row < dim; ++row) {
        offset += shared.mean[row] * l(row, i);
      }
      to.offset[std::ptrdiff_t{h} * dim + i] = offset;
    }
  }
};

/// Every slot is merged into the seed of its centre; the lists are empty then. A block a head.
template <class Scalar>
struct name_clusters {
  static constexpr index_t threads = 512;
  struct shared_memory {};

  cache_view<Scalar> cache;
  keep_evict_partition of;

  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    if (of.rows[h] < 0) {
      return;
    }
    for (index_t e = thread_index(); e < of.removed_count[h]; e += threads) {
      const index_t s = of.removed[cache.slot(h, e)];
      if (of.into[cache.slot(h, s)] == keep_evict_partition::evicted) {
        of.into[cache.slot(h, s)] = of.kept[cache.slot(h, of.nearest.into[cache.slot(h, e)])];
      }
    }
    sync_block();
    if (thread_index() == 0) {
      of.removed_count[h] = 0;
    }
  }
};

}  // namespace kvmeld::cuda::detail
