/// fold: leverage of un-rotated keys, what stands out among a head's slots.
#pragma once

#include "kvfold/cuda/device/cholesky.cuh"
#include "kvfold/cuda/memory/head_budgets.cuh"
#include "kvfold/cuda/memory/plan_memory.cuh"
#include "kvfold/cuda/policies/fold/rule.cuh"

namespace kvfold::cuda::detail {

/// Floats of a head's mean key `E[x] [dim]`, and of `E[x xᵀ]`, the lower triangle row by row.
struct key_moments {
  float* mean;

  KVFOLD_HD static index_t size(index_t dim) { return dim + dim * (dim + 1) / 2; }
  /// Row `i` of the triangle `[i + 1]`.
  KVFOLD_DEVICE float* row_of_second(index_t i, index_t dim) const {
    return mean + dim + std::ptrdiff_t{i} * (i + 1) / 2;
  }
};

/// What leverage is computed in, and leverage.
struct leverage_scratch {
  float* moments;   ///< [heads, key_moments::size(dim)]
  float* factor;    ///< [heads, dim, dim] covariance, then L⁻¹, column by column
  float* leverage;  ///< [heads, capacity]

  void allocate(workspace_allocator& from, const work_shape& shape) {
    const std::size_t n = shape.all_heads();
    const auto d = static_cast<std::size_t>(shape.dim);
    moments = from.take<float>(n * static_cast<std::size_t>(key_moments::size(shape.dim)));
    factor = from.take<float>(n * d * d), leverage = from.take<float>(shape.slots());
  }
};

/// The moments of a head's un-rotated keys, every slot counted once. A block has 32 rows of the
/// triangle, a warp four of them, and un-rotates 32 keys at a time itself.
template <class Scalar>
struct measure_moments {
  static constexpr index_t threads = 256;
  static constexpr index_t some = 32;                  // slots at a time
  static constexpr index_t own = 4;                    // rows of a warp
  static constexpr index_t rows = threads / 32 * own;  // of the triangle, a block
  static constexpr index_t columns = max_dim / 32;     // of a lane
  struct shared_memory {
    shared_array<float, some * max_dim> x;
  };

  cache_view<Scalar> cache;
  rope_params turn;
  head_budgets limits;
  const index_t* more;  // [heads] 0: leverage pins nothing, and is not wanted; or null
  index_t* planned;     // [heads] 0: the head is brought back to the budget; −1: it is not
  float* moments;       // [heads, key_moments::size(dim)]

  /// Grid: heads, stretches of `rows`.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), n = cache.length[h], dim = cache.dim;
    const index_t first = static_cast<index_t>(block_index().y) * rows + warp() * own;
    const bool plans = limits.of(h).reached(n) && (more == nullptr || more[h] != 0);
    if (block_index().y == 0 && thread_index() == 0) {
      planned[h] = plans ? 0 : -1;
    }
    if (!plans) {
      return;
    }
    const index_t* const position = cache.position + cache.slot(h, 0);
    const auto keys = cache.keys.of(h);
    const index_t pairs = rope_params::pairs(dim);
    float second[own][columns] = {}, sum[own] = {};
    for (index_t s0 = 0; s0 < n; s0 += some) {
      const index_t held = n - s0 < some ? n - s0 : some;
      sync_block();  // the last keys are used up
      for (index_t e = thread_index(); e < held * pairs; e += threads) {
        const index_t r = e / pairs;
        turn.pair(keys.at(s0 + r), dim, e % pairs, -position[s0 + r],
                  [&](index_t i, float x) { shared.x[r * max_dim + i] = x; });
      }
      sync_block();
      for (index_t r = 0; r < held; ++r) {
        float x[own];
        KVFOLD_UNROLL
        for (index_t u = 0; u < own; ++u) {
          x[u] = first + u < dim ? float{shared.x[r * max_dim + first + u]} : 0.0F;
          sum[u] += x[u];
        }
        KVFOLD_UNROLL
        for (index_t c = 0; c < columns; ++c) {
          if (const index_t j = 32 * c + lane(); j < dim) {
            const float y = shared.x[r * max_dim + j];
            KVFOLD_UNROLL
            for (index_t u = 0; u < own; ++u) {
              second[u][c] += x[u] * y;
            }
          }
        }
      }
    }
    const key_moments to{moments + std::ptrdiff_t{h} * key_moments::size(dim)};
    const float share = 1.0F / static_cast<float>(n > 0 ? n : 1);
    KVFOLD_UNROLL
    for (index_t u = 0; u < own; ++u) {
      const index_t i = first + u;
      KVFOLD_UNROLL
      for (index_t c = 0; c < columns; ++c) {
        if (const index_t j = 32 * c + lane(); i < dim && j <= i) {
          to.row_of_second(i, dim)[j] = share * second[u][c];
        }
      }
      if (lane() == 0 && i < dim) {
        to.mean[i] = share * sum[u];
      }
    }
  }
};

/// The covariance `E[x xᵀ] − E[x] E[x]ᵀ`, with `ridge` of its mean diagonal added to it, its
/// Cholesky factor, and the inverse of that: a block a head.
template <class Scalar>
struct invert_covariance {
  static constexpr index_t threads = 256;
  struct shared_memory {
    factor_memory factor;
    of_warps<float, threads> sum;
  };

  cache_view<Scalar> cache;
  float* moments;  // [heads, key_moments::size(dim)]
  const index_t* planned;
  float* factor;  // [heads, dim, dim]
  float ridge;

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head(), dim = cache.dim;
    if (planned[h] < 0) {
      return;
    }
    const key_moments of{moments + std::ptrdiff_t{h} * key_moments::size(dim)};
    float* const a = factor + std::ptrdiff_t{h} * dim * dim;
    float trace = 0;
    for (index_t i = warp(); i < dim; i += threads / 32) {
      const float* const row = of.row_of_second(i, dim);
      for (index_t j = lane(); j <= i; j += 32) {
        const float x = row[j] - of.mean[i] * of.mean[j];
        a[std::ptrdiff_t{j} * dim + i] = x;
        trace += i == j ? x : 0.0F;
      }
    }
    trace = block_sum(shared.sum, trace);
    const float more = ridge * (trace / static_cast<float>(dim));
    for (index_t i = thread_index(); i < dim; i += threads) {
      a[std::ptrdiff_t{i} * dim + i] += more > 1e-20F ? more : 1e-20F;
    }
    factor_inverse<threads>(shared.factor, a, dim);
  }
};

/// Leverage `|L⁻¹ (x − E[x])|²` of un-rotated keys of all slots, or of those that hold one token (0
/// of others). A block has 32 slots, a warp four of them at once: reads L⁻¹ once a block, K once.
template <class Scalar>
struct measure_leverage {
  static constexpr index_t threads = 256;
  static constexpr index_t own = 4;  // slots of a warp
  static constexpr index_t slots = threads / 32 * own;
  struct shared_memory {
    shared_array<float, slots * max_dim> x;
  };

  cache_view<Scalar> cache;
  state_view state;
  bool single;     // only slots that hold one token
  float* moments;  // [heads, key_moments::size(dim)]
  rope_params turn;
  const index_t* planned;
  const float* factor;  // [heads, dim, dim] L⁻¹
  float* leverage;      // [heads, capacity]

  /// Grid: heads, stretches of `slots`.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t s0 = static_cast<index_t>(block_index().y) * slots, n = cache.length[h];
    if (planned[h] < 0 || s0 >= n) {
      return;
    }
    const float* const mean = moments + std::ptrdiff_t{h} * key_moments::size(cache.dim);
    const auto wanted = [&](index_t s) {
      return s < n && (!single || state.column(fold_rule::tokens, h)[s] == 1.0F);
    };
    const auto keys = cache.keys.of(h);
    const index_t pairs = rope_params::pairs(cache.dim);
    for (index_t e = thread_index(); e < slots * pairs; e += threads) {
      const index_t r = e / pairs;
      const auto put = [&](index_t i, float x) { shared.x[r * max_dim + i] = x; };
      if (wanted(s0 + r)) {
        turn.pair(keys.at(s0 + r), cache.dim, e % pairs, -cache.position[cache.slot(h, s0 + r)],
                  [&](index_t i, float x) { put(i, x - mean[i]); });
      } else {
        put(2 * (e % pairs), 0), put(2 * (e % pairs) + 1, 0);
      }
    }
    sync_block();
    const float* const a = factor + std::ptrdiff_t{h} * cache.dim * cache.dim;
    float square[own] = {};
    for (index_t i = lane(); i < cache.dim; i += 32) {
      float y[own] = {};
      for (index_t j = 0; j <= i; ++j) {
        const float m = a[std::ptrdiff_t{j} * cache.dim + i];
        KVFOLD_UNROLL
        for (index_t u = 0; u < own; ++u) {
          y[u] += m * shared.x[(warp() * own + u) * max_dim + j];
        }
      }
      KVFOLD_UNROLL
      for (index_t u = 0; u < own; ++u) {
        square[u] += y[u] * y[u];
      }
    }
    KVFOLD_UNROLL
    for (index_t u = 0; u < own; ++u) {
      const float all = reduce_sum(square[u]);
      const index_t s = s0 + warp() * own + u;
      if (lane() == 0 && s < n) {
        leverage[cache.slot(h, s)] = wanted(s) ? all : 0.0F;
      }
    }
  }
};

/// `leverage [heads, capacity]` of the heads that are brought back to their budgets and want it
/// (`more`, if there is any), which `planned` then says. Three launches.
template <class Scalar>
void leverage_of_keys(const cache_view<Scalar>& cache, const state_view& state,
                      const fold_rule& rule, const head_budgets& limits, bool single,
                      const index_t* more, index_t* planned, const leverage_scratch& work,
                      stream stream) {
  const auto shares = [](index_t n, index_t of) {
    return static_cast<unsigned>((n + of - 1) / of);
  };
  const auto heads = cache.blocks();
  using moments = measure_moments<Scalar>;
  launch(moments{cache, rule.turn, limits, more, planned, work.moments},
         {heads, shares(cache.dim, moments::rows)}, stream);
  launch(invert_covariance<Scalar>{cache, work.moments, planned, work.factor, rule.leverage_ridge},
         {heads}, stream);
  using leverage = measure_leverage<Scalar>;
  launch(
      leverage{cache, state, single, work.moments, rule.turn, planned, work.factor, work.leverage},
      {heads, shares(cache.capacity, leverage::slots)}, stream);
}

}  // namespace kvfold::cuda::detail
