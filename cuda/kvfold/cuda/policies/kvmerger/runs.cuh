/// KVMerger: runs of consecutive similar keys become one slot.
#pragma once

#include "kvfold/cuda/device/block_radix_select.cuh"
#include "kvfold/cuda/memory/head_budgets.cuh"
#include "kvfold/cuda/merge/rows.cuh"
#include "kvfold/cuda/policies/kvmerger/rule.cuh"

namespace kvfold::cuda::detail {

/// All slots by position, into `kept`, a block a head. Those that were selected take no part:
/// `fresh` in their own `into`.
template <class Scalar>
struct order_by_position {
  static constexpr index_t threads = 512;
  struct shared_memory {
    sort_memory<threads> sort;
  };

  cache_view<Scalar> cache;
  keep_evict_partition of;

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (of.rows[h] < 0) {
      return;
    }
    const index_t n = cache.length[h];
    const index_t* const position = cache.position + cache.slot(h, 0);
    index_t* const order = of.removed + cache.slot(h, 0);
    index_t* const into = of.into + cache.slot(h, 0);
    index_t most = 0;
    for (index_t s = thread_index(); s < n; s += threads) {
      order[s] = s;
      into[s] = into[s] == s ? s | keep_evict_partition::fresh : s;
      most = position[s] > most ? position[s] : most;
    }
    most = block_max(shared.sort.number, most);
    const index_t* const sorted = block_sort(
        shared.sort, order, of.nearest.into + cache.slot(h, 0), n, static_cast<unsigned>(most),
        [&](index_t s) { return static_cast<unsigned>(position[s]); });
    for (index_t i = thread_index(); i < n; i += threads) {
      of.kept[cache.slot(h, i)] = sorted[i];
    }
    if (thread_index() == 0) {
      of.removed_count[h] = 0;  // no slot is matched
    }
  }
};

/// `cos(k_a, k_b)` of every two neighbours in position that may join (algorithm 1), by the left
/// slot: `nearest.into` says the right one, −1 where none may. A warp a pair; reads K twice.
template <class Scalar>
struct pair_cosines {
  static constexpr index_t threads = 256;
  static constexpr index_t pairs = 128;  // a block
  struct shared_memory {};

  cache_view<Scalar> cache;
  keep_evict_partition of;
  bool gaps_break;
  bool aligned;

  /// Grid: heads, stretches of `pairs`.
  KVFOLD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    if (of.rows[h] < 0) {
      return;
    }
    constexpr index_t width = vector_16<Scalar>::size;
    const index_t n = cache.length[h];
    const index_t begin = static_cast<index_t>(block_index().y) * pairs;
    const auto keys = cache.keys.of(h);
    const index_t* const order = of.kept + cache.slot(h, 0);
    for (index_t i = begin + warp(); i < n && i < begin + pairs; i += threads / 32) {
      const index_t a = order[i], b = i + 1 < n ? order[i + 1] : a;
      const bool joins =
          i + 1 < n && !apart(h, a) && !apart(h, b) &&
          (!gaps_break || cache.position[cache.slot(h, b)] == cache.position[cache.slot(h, a)] + 1);
      float ab = 0, aa = 0, bb = 0;
      for (index_t e = lane() * width; joins && e < cache.dim; e += 32 * width) {
        const auto x = load_row(keys.at(a), e, cache.dim, aligned);
        const auto y = load_row(keys.at(b), e, cache.dim, aligned);
        KVFOLD_UNROLL
        for (index_t j = 0; j < width; ++j) {
          ab += to_float(x[j]) * to_float(y[j]);
          aa += to_float(x[j]) * to_float(x[j]);
          bb += to_float(y[j]) * to_float(y[j]);
        }
      }
      ab = reduce_sum(ab), aa = reduce_sum(aa), bb = reduce_sum(bb);
      const float norms = square_root(aa) * square_root(bb);
      if (lane() == 0) {
        of.nearest.into[cache.slot(h, a)] = joins ? b : -1;
        of.nearest.similarity[cache.slot(h, a)] = norms > 0 ? ab / norms : 0.0F;
      }
    }
  }

 private:
  KVFOLD_DEVICE bool apart(index_t h, index_t s) const {
    return (of.into[cache.slot(h, s)] & keep_evict_partition::fresh) != 0;
  }
};

/// ε: as many of the most similar pairs join as slots must go (ties to the lower slot), or, with a
/// threshold, all above it if they are more; then every run goes to its member of largest score,
/// ties to the lower slot. A block a head.
template <class Scalar>
struct name_runs {
  static constexpr index_t threads = 512;
  struct shared_memory {
    radix_select_memory radix;
    of_warps<index_t, threads> number;
    prefix_memory<threads> prefix;
  };

  cache_view<Scalar> cache;
  state_view state;
  keep_evict_partition of;
  head_budgets limits;
  bool by_threshold;
  float epsilon;

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (of.rows[h] < 0) {
      return;
    }
    cut(shared, h, cache.length[h]);
    sync_block();
    name(h, cache.length[h]);
  }

 private:
  KVFOLD_DEVICE void cut(shared_memory& shared, index_t h, index_t n) const {
    index_t* const right = of.nearest.into + cache.slot(h, 0);
    const float* const u = of.nearest.similarity + cache.slot(h, 0);
    index_t pairs = 0, above = 0;
    for (index_t s = thread_index(); s < n; s += threads) {
      pairs += right[s] >= 0 ? 1 : 0;
      above += right[s] >= 0 && u[s] > epsilon ? 1 : 0;
    }
    pairs = block_sum(shared.number, pairs), above = block_sum(shared.number, above);
    const index_t surplus = n - limits.of(h).target;
    const index_t wanted = by_threshold && above > surplus ? above : surplus;
    if (wanted >= pairs) {
      return;
    }
    block_radix_select<threads>::each_but_highest(
        shared.radix, shared.prefix, n, wanted, [&](index_t s) { return right[s] >= 0; },
        [&](index_t s) { return ordered(u[s]); }, [&](index_t s) { right[s] = -1; });
  }

  /// A warp a run, from its first member on.
  KVFOLD_DEVICE void name(index_t h, index_t n) const {
    const index_t* const order = of.kept + cache.slot(h, 0);
    const index_t* const right = of.nearest.into + cache.slot(h, 0);
    index_t* const into = of.into + cache.slot(h, 0);
    const head_context head = context_of(cache, state, h, 0);
    const auto joined = [&](index_t i) { return i > 0 && i < n && right[order[i - 1]] >= 0; };
    for (index_t base = warp() * 32; base < n; base += threads) {
      const index_t own = base + lane();
      unsigned starts = ballot(own < n && !joined(own) && joined(own + 1));
      while (starts != 0) {
        const index_t first = base + lowest_lane(starts);
        starts &= starts - 1;
        candidate best = 0;
        index_t end = first + 1;
        for (;; end += 32) {
          const unsigned others = ballot(!joined(end + lane()));
          if (others != 0) {
            end += lowest_lane(others);
            break;
          }
        }
        for (index_t i = first + lane(); i < end; i += 32) {
          const candidate c = most_candidate(ordered(head.column(0, order[i])), order[i]);
          best = c > best ? c : best;
        }
        const index_t pivot = most_slot(reduce_max(best));
        for (index_t i = first + lane(); i < end; i += 32) {
          into[order[i]] = pivot;
        }
      }
    }
  }
};

/// A row's total score, by its anchor. For `weigh_rows`.
struct row_scores {
  float* total;  // [heads, capacity]

  KVFOLD_DEVICE bool alone(const head_context&, index_t, bool) const { return true; }
  template <class Scalar>
  KVFOLD_DEVICE void operator()(const cache_view<Scalar>& cache, index_t h,
                                const head_context& head, merge_source* row, index_t size,
                                float&) const {
    float sum = 0;
    for (index_t i = lane(); i < size; i += 32) {
      sum += head.column(0, row[i].source);
    }
    sum = reduce_sum(sum);
    if (lane() == 0) {
      total[cache.slot(h, row[0].source)] = sum;
    }
  }
};

/// Algorithm 2, eqs. 6–8: Gaussian weights about the pivot; values times the run's size.
struct gaussian_weights {
  float sigma;
  bool scale_values;

  KVFOLD_DEVICE bool alone(const head_context&, index_t, bool) const { return false; }
  template <class Scalar>
  KVFOLD_DEVICE void operator()(const cache_view<Scalar>& cache, index_t h, const head_context&,
                                merge_source* row, index_t size, float&) const {
    const auto keys = cache.keys.of(h);
    const Scalar* const pivot = keys.at(row[0].source);
    const auto count = static_cast<float>(size);
    float mean = 0;
    for (index_t i = 0; i < size; ++i) {
      const Scalar* const other = keys.at(row[i].source);
      float square = 0;
      for (index_t e = lane(); e < cache.dim; e += 32) {
        const float apart = to_float(pivot[e]) - to_float(other[e]);
        square += apart * apart;
      }
      square = reduce_sum(square);
      mean += square_root(square) / count;  // the pivot's 0 counts
      if (lane() == 0) {
        row[i].key_weight = square;
      }
    }
    sync_warp();
    const float own = mean / square_root(2.0F);
    const float s = sigma > 0 ? sigma : own > 1e-6F ? own : 1e-6F;
    float sum = 0;
    for (index_t i = lane(); i < size; i += 32) {
      row[i].key_weight = exponential(-row[i].key_weight / (2 * s * s));
      sum += row[i].key_weight;
    }
    sum = reduce_sum(sum);
    for (index_t i = lane(); i < size; i += 32) {
      const float w = row[i].key_weight / sum;
      row[i].key_weight = w, row[i].value_weight = scale_values ? count * w : w;
    }
  }
};

}  // namespace kvfold::cuda::detail
