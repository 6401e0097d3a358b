/// From each slot's destination to the rows of a plan.
#pragma once

#include "kvfold/cuda/device/block_sort.cuh"
#include "kvfold/cuda/memory/head_context.cuh"
#include "kvfold/cuda/memory/lists.cuh"

namespace kvfold::cuda::detail {

/// Every removed slot joins the nearest.
struct join_all {
  /// By the whole block: the least similarity at which slots join.
  template <class Scalar, index_t Threads>
  KVFOLD_DEVICE float threshold(of_warps<double, Threads>&, const cache_view<Scalar>&,
                                const keep_evict_partition&, const state_view&, index_t) const {
    return lowest_score;
  }
};

/// Those at or above a similarity.
struct join_above {
  float similarity;

  template <class Scalar, index_t Threads>
  KVFOLD_DEVICE float threshold(of_warps<double, Threads>&, const cache_view<Scalar>&,
                                const keep_evict_partition&, const state_view&, index_t) const {
    return similarity;
  }
};

/// A block a head: removed slots go where `match` and `join` send them; then all slots of rows
/// are sorted by anchor, the anchor before its others, and those ascending, as
/// `kvfold::for_each_row` has them. Every weight is 1 and every log-mass the anchor's: `weigh_rows`
/// comes after. The lists are scratch then.
template <class Scalar, class Join>
struct make_rows {
  static constexpr index_t threads = 512;
  struct shared_memory {
    sort_memory<threads> sort;
    of_warps<double, threads> sum;
  };

  cache_view<Scalar> cache;
  state_view state;
  keep_evict_partition from;
  plan_view plan;
  Join join;

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (from.rows[h] < 0) {
      return;
    }
    const index_t n = cache.length[h];
    index_t* const into = from.into + cache.slot(h, 0);
    index_t* const order = from.kept + cache.slot(h, 0);
    index_t* const spare = from.removed + cache.slot(h, 0);
    const float least = join.threshold(shared.sum, cache, from, state, h);
    for (index_t e = thread_index(); e < from.removed_count[h]; e += threads) {
      const float similarity = from.nearest.similarity[cache.slot(h, e)];
      into[spare[e]] =
          similarity < least ? keep_evict_partition::evicted : from.nearest.into[cache.slot(h, e)];
      from.similarity[cache.slot(h, spare[e])] = similarity;
    }
    sync_block();
    index_t goes = 0;
    for (index_t s = thread_index(); s < n; s += threads) {
      order[s] = s;
      goes += into[s] != keep_evict_partition::evicted ? 1 : 0;
    }
    goes = block_sum(shared.sort.number, goes);
    const auto key = [&](index_t s) {
      const index_t to = into[s] & ~keep_evict_partition::fresh;
      return into[s] == keep_evict_partition::evicted
                 ? 2U * static_cast<unsigned>(n)
                 : 2U * static_cast<unsigned>(to) + (to == s ? 0U : 1U);
    };
    const index_t* const sorted =
        block_sort(shared.sort, order, spare, n, 2U * static_cast<unsigned>(n), key);
    merge_source* const sources = plan.sources + cache.slot(h, 0);
    index_t* const begin = plan.begin + cache.bound(h, 0);
    index_t rows = 0;
    for (index_t base = 0, turn = 0; base < goes; base += threads, turn ^= 1) {
      const index_t e = base + thread_index();
      const index_t s = e < goes ? sorted[e] : 0;
      const bool leads = e < goes && (into[s] & ~keep_evict_partition::fresh) == s;
      const auto before = block_prefix(shared.sort.prefix, turn, leads ? 1 : 0, 0);
      if (e < goes) {
        sources[e] = {s, 1.0F, 1.0F};
      }
      if (leads) {
        begin[rows + before.a] = e;
        plan.log_mass[cache.slot(h, rows + before.a)] = cache.log_mass[cache.slot(h, s)];
      }
      rows += before.all_a;
    }
    if (thread_index() == 0) {
      begin[rows] = goes;
      plan.rows[h] = rows;
    }
  }
};

/// A warp a row: `weights` has the row's sources and log-mass. Rows of one slot that was kept stay
/// as they are, unless `weights.alone`.
template <class Scalar, class Weights>
struct weigh_rows {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  cache_view<Scalar> cache;
  state_view state;
  keep_evict_partition from;
  plan_view plan;
  Weights weights;

  /// Grid: heads, any number of blocks that share the rows.
  KVFOLD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    const head_context head = context_of(cache, state, h, 0);
    const index_t* const begin = plan.begin + cache.bound(h, 0);
    each_by_warp<threads>(plan.rows[h], [&](index_t r) {
      merge_source* const row = plan.sources + cache.slot(h, begin[r]);
      const index_t size = begin[r + 1] - begin[r];
      const bool was_kept =
          (from.into[cache.slot(h, row[0].source)] & keep_evict_partition::fresh) == 0;
      if (size > 1 || weights.alone(head, row[0].source, was_kept)) {
        weights(cache, h, head, row, size, plan.log_mass[cache.slot(h, r)]);
      }
    });
  }
};

/// Rows and their weights: two launches.
template <class Scalar, class Join, class Weights>
void write_rows(const cache_view<Scalar>& cache, const state_view& state,
                const keep_evict_partition& from, const plan_view& plan, const Join& join,
                const Weights& weights, index_t target, stream stream) {
  const auto heads = cache.blocks();
  launch(make_rows<Scalar, Join>{cache, state, from, plan, join}, {heads}, stream);
  launch(weigh_rows<Scalar, Weights>{cache, state, from, plan, weights},
         {heads, static_cast<unsigned>((target + 63) / 64)}, stream);
}

}  // namespace kvfold::cuda::detail
