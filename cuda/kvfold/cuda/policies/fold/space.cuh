/// fold after a prompt: the space that its reference queries measure slots in.
#pragma once

#include "kvfold/cuda/policies/fold/reference.cuh"

namespace kvfold::cuda::detail {

/// `scale² (C + 10⁻³ I)`, C the covariance of the reference queries: how much apart keys are to
/// them. A block has 16 rows, and reads the queries twice.
template <class Scalar>
struct query_metric {
  static constexpr index_t threads = 256;
  static constexpr index_t some = 32;  // queries at a time
  static constexpr index_t rows = 16;
  static constexpr index_t own = rows / (threads / 32);
  struct shared_memory {
    shared_array<float, some * max_dim> x;
    shared_array<float, max_dim> mean;
  };

  cache_view<Scalar> cache;
  chosen_rows<Scalar> queries;
  float* metric;  // [heads, dim, dim]

  /// Grid: heads, stretches of `rows`.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (!queries.asks(h)) {
      return;
    }
    const index_t first = static_cast<index_t>(block_index().y) * rows;
    const index_t count = queries.count * cache.group;
    const auto query = [&](index_t e) {
      return queries.at(h, e / queries.count, e % queries.count);
    };
    for (index_t i = thread_index(); i < cache.dim; i += threads) {
      float sum = 0;
      for (index_t e = 0; e < count; ++e) {
        sum += to_float(query(e)[i]);
      }
      shared.mean[i] = sum / static_cast<float>(count);
    }
    float sum[own][max_dim / 32] = {};
    for (index_t e0 = 0; e0 < count; e0 += some) {
      const index_t held = count - e0 < some ? count - e0 : some;
      sync_block();
      for (index_t e = thread_index(); e < held * cache.dim; e += threads) {
        const index_t r = e / cache.dim, i = e % cache.dim;
        shared.x[r * max_dim + i] = to_float(query(e0 + r)[i]) - shared.mean[i];
      }
      sync_block();
      KVFOLD_UNROLL
      for (index_t u = 0; u < own; ++u) {
        const index_t i = first + u * (threads / 32) + warp();
        KVFOLD_UNROLL
        for (index_t w = 0; w < max_dim / 32; ++w) {
          const index_t j = w * 32 + lane();
          for (index_t r = 0; r < held && i < cache.dim && j < cache.dim; ++r) {
            sum[u][w] += shared.x[r * max_dim + i] * shared.x[r * max_dim + j];
          }
        }
      }
    }
    KVFOLD_UNROLL
    for (index_t u = 0; u < own; ++u) {
      const index_t i = first + u * (threads / 32) + warp();
      KVFOLD_UNROLL
      for (index_t w = 0; w < max_dim / 32; ++w) {
        const index_t j = w * 32 + lane();
        if (i < cache.dim && j < cache.dim) {
          const float x = sum[u][w] / static_cast<float>(count) + (i == j ? 1e-3F : 0.0F);
          metric[(std::ptrdiff_t{h} * cache.dim + i) * cache.dim + j] =
              cache.scale * cache.scale * x;
        }
      }
    }
  }
};

/// `kᵀ M k` and `v·v` of every slot. A block has 32 slots.
template <class Scalar>
struct space_squares {
  static constexpr index_t threads = 256;
  static constexpr index_t own = 4;  // slots of a warp
  static constexpr index_t slots = threads / 32 * own;
  struct shared_memory {
    shared_array<float, slots * max_dim> x;
  };

  cache_view<Scalar> cache;
  const index_t* planned;    // [heads]
  const float* metric;       // [heads, dim, dim]
  float *of_key, *of_value;  // [heads, capacity]

  /// Grid: heads, stretches of `slots`.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t s0 = static_cast<index_t>(block_index().y) * slots, n = cache.length[h];
    if (planned[h] < 0 || s0 >= n) {
      return;
    }
    const auto keys = cache.keys.of(h), values = cache.values.of(h);
    for (index_t e = thread_index(); e < slots * cache.dim; e += threads) {
      const index_t r = e / cache.dim, i = e % cache.dim;
      shared.x[r * max_dim + i] = s0 + r < n ? to_float(keys.at(s0 + r)[i]) : 0.0F;
    }
    sync_block();
    const float* const m = metric + std::ptrdiff_t{h} * cache.dim * cache.dim;
    float square[own] = {}, of_v[own] = {};
    for (index_t i = lane(); i < cache.dim; i += 32) {
      float y[own] = {};
      for (index_t j = 0; j < cache.dim; ++j) {
        const float c = m[std::ptrdiff_t{j} * cache.dim + i];
        KVFOLD_UNROLL
        for (index_t u = 0; u < own; ++u) {
          y[u] += c * shared.x[(warp() * own + u) * max_dim + j];
        }
      }
      KVFOLD_UNROLL
      for (index_t u = 0; u < own; ++u) {
        const index_t r = warp() * own + u;
        square[u] += y[u] * shared.x[r * max_dim + i];
        const float v = s0 + r < n ? to_float(values.at(s0 + r)[i]) : 0.0F;
        of_v[u] += v * v;
      }
    }
    KVFOLD_UNROLL
    for (index_t u = 0; u < own; ++u) {
      const float k = reduce_sum(square[u]), v = reduce_sum(of_v[u]);
      const index_t s = s0 + warp() * own + u;
      if (lane() == 0 && s < n) {
        of_key[cache.slot(h, s)] = k, of_value[cache.slot(h, s)] = v;
      }
    }
  }
};

/// `1 / (mean ‖v‖)²`, squares in the space, and how much a slot pulls: its mass, with a floor. A
/// block a head.
template <class Scalar>
struct weigh_space {
  static constexpr index_t threads = 512;
  struct shared_memory {
    of_warps<float, threads> sum;
  };

  cache_view<Scalar> cache;
  const index_t* planned;                 // [heads]
  const float *of_key, *of_value, *mass;  // [heads, capacity]
  float floor;
  float *inverse, *square, *weight;  // [heads], [heads, capacity] twice

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (planned[h] < 0) {
      return;
    }
    const index_t n = cache.length[h];
    float norms = 0;
    for (index_t s = thread_index(); s < n; s += threads) {
      norms += square_root(of_value[cache.slot(h, s)]);
    }
    const float norm = block_sum(shared.sum, norms) / static_cast<float>(n);
    const float share = norm > 1e-18F ? 1.0F / (norm * norm) : 0.0F;
    for (index_t s = thread_index(); s < n; s += threads) {
      const std::ptrdiff_t at = cache.slot(h, s);
      square[at] = of_key[at] + of_value[at] * share;
      weight[at] = mass[at] + floor / static_cast<float>(n);
    }
    if (thread_index() == 0) {
      inverse[h] = share;
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
