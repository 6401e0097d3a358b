/// fold: the moments of un-rotated keys, and what stands out by them.
#pragma once

#include "kvfold/cuda/device/cholesky.cuh"
#include "kvfold/cuda/memory/head_budgets.cuh"
#include "kvfold/cuda/memory/lists.cuh"
#include "kvfold/cuda/policies/fold/rule.cuh"

namespace kvfold::cuda::detail {

/// Adds to the moments the keys that came since they were last counted, 32 slots at a time: E[x]
/// and E[x xᵀ] of all. Each block has 16 rows of the triangle, and un-rotates the keys itself.
template <class Scalar>
struct add_moments {
  static constexpr index_t threads = 256;
  static constexpr index_t some = 32;  // slots at a time
  static constexpr index_t rows = 16;  // of the triangle, a block
  static constexpr index_t most = 1 << 24;
  struct shared_memory {
    shared_array<float, some * max_dim> x;
  };

  cache_view<Scalar> cache;
  key_memory moments;
  rope_params turn;
  head_budgets limits;
  index_t* planned;  // [heads] 0: the head is brought back to the budget; −1: it is not

  /// Grid: heads, stretches of `rows`.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t first = static_cast<index_t>(block_index().y) * rows, n = cache.length[h];
    const bool plans = limits.of(h).reached(n);
    if (first == 0 && thread_index() == 0) {
      planned[h] = plans ? 0 : -1;
    }
    if (!plans) {
      return;
    }
    const fold_floats memory = moments.of(cache, h);
    const index_t* const position = cache.position + cache.slot(h, 0);
    const index_t from = memory.get(fold_floats::counted);
    const index_t end = first + rows < cache.dim ? first + rows : cache.dim;
    const auto keys = cache.keys.of(h);
    index_t count = memory.get(fold_floats::keys);
    for (index_t s0 = 0; s0 < n; s0 += some) {
      const index_t own = s0 + lane();
      const unsigned fresh = ballot(own < n && position[own] >= from);
      if (fresh == 0) {
        continue;  // the same in every warp
      }
      const index_t held = count_lanes(fresh);
      const index_t pairs = rope_params::pairs(cache.dim);
      sync_block();  // the last keys are used up
      for (index_t e = thread_index(); e < some * pairs; e += threads) {
        const index_t r = e / pairs;
        if ((fresh >> r & 1U) != 0) {
          turn.pair(keys.at(s0 + r), cache.dim, e % pairs, -position[s0 + r],
                    [&](index_t i, float x) { shared.x[r * max_dim + i] = x; });
        }
      }
      sync_block();
      count = count + held < most ? count + held : most;
      const float share = 1.0F / static_cast<float>(count);
      const float lost = static_cast<float>(held) * share;
      for (index_t i = first + warp(); i < end; i += threads / 32) {
        float* const row = memory.row_of_second(i);
        for (index_t j = lane(); j <= i; j += 32) {
          float sum = 0;
          for (unsigned left = fresh; left != 0; left &= left - 1) {
            const index_t r = lowest_lane(left);
            sum += share * shared.x[r * max_dim + i] * shared.x[r * max_dim + j];
          }
          row[j] += sum - lost * row[j];
        }
        float sum = 0;
        for (unsigned left = fresh; left != 0; left &= left - 1) {
          sum += share * shared.x[lowest_lane(left) * max_dim + i];
        }
        if (lane() == 0) {
          float& mean = memory.mean()[i];
          mean += sum - lost * mean;
        }
      }
    }
  }
};

/// The covariance `E[x xᵀ] − E[x] E[x]ᵀ`, with `ridge` of its mean diagonal added to it, its
/// Cholesky factor, and the inverse of that: a block a head. What was counted is noted.
template <class Scalar>
struct invert_covariance {
  static constexpr index_t threads = 256;
  struct shared_memory {
    factor_memory factor;
    of_warps<float, threads> sum;
    of_warps<index_t, threads> number;
  };

  cache_view<Scalar> cache;
  key_memory moments;  // whose covariance it is
  key_memory noted;    // what was counted
  const index_t* planned;
  float* factor;  // [heads, dim, dim]
  float ridge;

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (planned[h] < 0) {
      return;
    }
    const fold_floats memory = moments.of(cache, h);
    float* const a = factor + std::ptrdiff_t{h} * cache.dim * cache.dim;
    const float* const mean = memory.mean();
    float trace = 0;
    for (index_t i = warp(); i < cache.dim; i += threads / 32) {
      const float* const row = memory.row_of_second(i);
      for (index_t j = lane(); j <= i; j += 32) {
        const float x = row[j] - mean[i] * mean[j];
        a[std::ptrdiff_t{j} * cache.dim + i] = x;
        trace += i == j ? x : 0.0F;
      }
    }
    trace = block_sum(shared.sum, trace);
    const float more = ridge * (trace / static_cast<float>(cache.dim));
    for (index_t i = thread_index(); i < cache.dim; i += threads) {
      a[std::ptrdiff_t{i} * cache.dim + i] += more > 1e-20F ? more : 1e-20F;
    }
    factor_inverse<threads>(shared.factor, a, cache.dim);
    const fold_floats note = noted.of(cache, h);
    const index_t from = note.get(fold_floats::counted);
    index_t count = 0;
    for (index_t s = thread_index(); s < cache.length[h]; s += threads) {
      count += cache.position[cache.slot(h, s)] >= from ? 1 : 0;
    }
    count = block_sum(shared.number, count);
    if (thread_index() == 0) {
      constexpr index_t most = add_moments<Scalar>::most;
      count += note.get(fold_floats::keys);
      note.set(fold_floats::keys, count < most ? count : most);
      note.set(fold_floats::counted, cache.tokens_total[h]);
    }
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
  bool single;  // only slots that hold one token
  key_memory moments;
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
    const float* const mean = moments.of(cache, h).mean();
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

}  // namespace kvfold::cuda::detail
