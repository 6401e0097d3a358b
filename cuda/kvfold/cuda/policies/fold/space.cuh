/// fold after a prompt: the space that its reference queries measure slots in.
#pragma once

#include "kvfold/cuda/device/cholesky.cuh"
#include "kvfold/cuda/policies/fold/moments.cuh"
#include "kvfold/cuda/policies/fold/points.cuh"
#include "kvfold/cuda/policies/fold/reference.cuh"

namespace kvfold::cuda::detail {

/// Reference queries of a head's whole group, as rows of `sum_moments`.
template <class Scalar>
struct reference_rows {
  chosen_rows<Scalar> queries;
  index_t group, dim;

  KVFOLD_DEVICE index_t count(index_t) const { return queries.count * group; }
  KVFOLD_DEVICE bool asks(index_t h) const { return queries.asks(h); }
  struct of_head {
    const reference_rows& all;
    index_t head;

    struct loaded {
      Scalar x, y;
    };
    KVFOLD_DEVICE loaded load(index_t e, index_t p) const {
      const index_t count = all.queries.count, i = 2 * p;
      const Scalar* const row = all.queries.at(head, e / count, e % count);
      return {row[i], row[i + 1 < all.dim ? i + 1 : i]};
    }
    KVFOLD_DEVICE number_pair number(const loaded& of, index_t p) const {
      const bool both = 2 * p + 1 < all.dim;
      return {2 * p, both ? 2 * p + 1 : -1, to_float(of.x), both ? to_float(of.y) : 0.0F};
    }
  };
  KVFOLD_DEVICE of_head of(index_t h) const { return {*this, h}; }
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
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), stretch = static_cast<index_t>(block_index().y);
    const index_t s0 = stretch * slots, n = cache.length[h];
    if (planned[h] < 0) {
      return;
    }
    const auto keys = cache.keys.of(h), values = cache.values.of(h);
    float sum[max_dim / 32] = {}, norms = 0;
    for (index_t s = s0 + warp(); s < s0 + slots && s < n; s += warps) {
      const Scalar *const k = keys.at(s), *const v = values.at(s);
      float square = 0;
      KVFOLD_UNROLL
      for (index_t u = 0; u < max_dim / 32; ++u) {
        if (const index_t i = u * 32 + lane(); i < cache.dim) {
          const float x = to_float(v[i]);
          sum[u] += to_float(k[i]), square += x * x;
        }
      }
      norms += square_root(reduce_sum(square));
    }
    KVFOLD_UNROLL
    for (index_t u = 0; u < max_dim / 32; ++u) {
      shared.key[warp() * max_dim + u * 32 + lane()] = sum[u];
    }
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

/// Of the queries' metric its Cholesky factor L, column by column with zeros above the diagonal;
/// the mean key times it; what values are times. With nothing pinned the heaviest slot is the first
/// seed. A block a head.
template <class Scalar>
struct factor_space {
  static constexpr index_t threads = max_dim;
  struct shared_memory {
    factor_memory factor;
    shared_array<float, max_dim> mean;
  };

  cache_view<Scalar> cache;
  const index_t* planned;  // [heads]
  space_sums sums;
  index_t stretches;
  const float* mass;  // [heads, capacity]
  float floor;
  point_space to;

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), n = cache.length[h], i = thread_index();
    if (planned[h] < 0) {
      return;
    }
    const auto count = static_cast<float>(n);
    const std::ptrdiff_t at = std::ptrdiff_t{h} * stretches;
    float sum = 0;
    for (index_t s = 0; s < stretches && i < cache.dim; ++s) {
      sum += sums.key[(at + s) * cache.dim + i];
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
    float* const l = to.factor + std::ptrdiff_t{h} * cache.dim * cache.dim;
    factor_lower<threads>(shared.factor, l, cache.dim);
    const split_factor<Scalar> split{static_cast<Scalar*>(to.split), cache.dim};
    for (index_t e = i; e < cache.dim * cache.dim; e += threads) {
      const index_t row = e % cache.dim, column = e / cache.dim;
      float x = row < column ? 0.0F : row == column ? 1.0F / l[e] : l[e];
      l[e] = x;
      KVFOLD_UNROLL
      for (index_t part = 0; part < split_factor<Scalar>::parts; ++part) {
        const auto high = from_float<Scalar>(x);
        split.column(h, part, column)[row] = high;
        x -= to_float(high);
      }
    }
    sync_block();
    if (i < cache.dim) {
      float offset = 0;
      for (index_t r = i; r < cache.dim; ++r) {
        offset += shared.mean[r] * l[std::ptrdiff_t{i} * cache.dim + r];
      }
      to.offset[std::ptrdiff_t{h} * cache.dim + i] = offset;
    }
    for (index_t s = i; s < n; s += threads) {
      to.weight[cache.slot(h, s)] = mass[cache.slot(h, s)] + floor / count;
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

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory&) const {
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

}  // namespace kvfold::cuda::detail
