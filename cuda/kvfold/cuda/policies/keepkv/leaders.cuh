/// KeepKV's prompt: merged first, then evicted. In descending order of weight, each slot joins its
/// most similar leader or becomes one.
#pragma once

#include "kvfold/cuda/device/block_radix_select.cuh"
#include "kvfold/cuda/device/block_sort.cuh"
#include "kvfold/cuda/memory/head_budgets.cuh"
#include "kvfold/cuda/merge/rows.cuh"
#include "kvfold/cuda/policies/keepkv/rule.cuh"
#include "kvfold/cuda/search/match.cuh"

namespace kvfold::cuda::detail {

/// Leaders from the start are the protected slots (`kept`); the others (`removed`) are compared
/// with leaders in descending order, ties to the lower slot. A block a head.
template <class Scalar>
struct order_joiners {
  static constexpr index_t threads = 512;
  struct shared_memory {
    sort_memory<threads> sort;
  };

  cache_view<Scalar> cache;
  state_view state;
  keepkv_rule rule;
  head_budgets limits;
  keep_evict_partition of;

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t n = cache.length[h], target = limits.of(h).target;
    if (n <= target) {
      if (thread_index() == 0) {
        of.none(h);
      }
      return;
    }
    const head_context head =
        context_of(cache, state, h, newest_of(shared.sort.number, cache, h, n));
    const keepkv_rule mine = under_target(rule, target);
    index_t* const order = of.removed + cache.slot(h, 0);
    index_t held = 0;
    for (index_t s = thread_index(); s < n; s += threads) {
      const bool is_protected = mine.is_protected(head, s);
      of.into[cache.slot(h, s)] = is_protected ? s : keep_evict_partition::evicted;
      order[s] = s;
      held += is_protected ? 1 : 0;
    }
    held = block_sum(shared.sort.number, held);
    // Four passes or none: it ends where it began. Those held come last.
    block_sort(shared.sort, order, of.nearest.into + cache.slot(h, 0), n, ~0U,
               [&](index_t s) { return mine.is_protected(head, s) ? ~0U : ~mine.order(head, s); });
    for (index_t i = thread_index(); i < held; i += threads) {
      of.kept[cache.slot(h, i)] = order[n - held + i];
    }
    if (thread_index() == 0) {
      of.rows[h] = 0, of.kept_count[h] = held, of.removed_count[h] = n - held;
    }
  }
};

/// Joins, a block a head, 64 slots at once: the nearest of the leaders before them is found as
/// in `match`; among themselves, one after another by their own products.
template <class Scalar, index_t Depth>
struct join_leaders {
  using shape = tile_shape<Scalar, Depth>;
  static constexpr index_t threads = shape::threads;
  static constexpr index_t joiners = 64;
  struct shared_memory {
    typename shape::row_array joining;
    typename shape::column_array leading;
    shared_array<index_t, shape::columns> slot;  // −1: none
    shared_array<float, shape::columns> norm;
    shared_array<candidate, joiners> best;
    shared_array<float, joiners * joiners> among;  // cosines of joiners
    shared_array<index_t, 1> leaders;
  };

  cache_view<Scalar> cache;
  keep_evict_partition of;
  const float* norm;  // [heads, capacity] squared
  float similarity;
  bool aligned;

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (of.rows[h] < 0) {
      return;
    }
    const index_t count = of.removed_count[h];
    const index_t* const order = of.removed + cache.slot(h, 0);
    index_t* const leaders = of.kept + cache.slot(h, 0);
    const auto keys = cache.keys.of(h);
    index_t led = of.kept_count[h];
    for (index_t w0 = 0; w0 < count; w0 += joiners) {
      const index_t some = count - w0 < joiners ? count - w0 : joiners;
      shape::template load<shape::rows>(
          shared.joining, [&](index_t r) { return r < some ? keys.at(order[w0 + r]) : nullptr; },
          cache.keys.data, cache.dim, aligned);
      candidate best[shape::row_tiles][2] = {};
      float own[shape::row_tiles][2];
      KVFOLD_UNROLL
      for (index_t m = 0; m < shape::row_tiles; ++m) {
        KVFOLD_UNROLL
        for (index_t i = 0; i < 2; ++i) {
          const index_t r = shape::row(m, 2 * i);
          own[m][i] = r < some ? norm[cache.slot(h, order[w0 + r])] : 0.0F;
        }
      }
      for (index_t c0 = 0; c0 < led; c0 += shape::columns) {
        each_cosine(shared, h, leaders, c0, led, own,
                    [&](index_t m, index_t j, index_t column, float u) {
                      const index_t s = shared.slot[column];
                      const candidate it = s < 0 ? candidate{0} : most_candidate(ordered(u), s);
                      candidate& most = best[m][j / 2];
                      most = it > most ? it : most;
                    });
      }
      KVFOLD_UNROLL
      for (index_t m = 0; m < shape::row_tiles; ++m) {
        KVFOLD_UNROLL
        for (index_t i = 0; i < 2; ++i) {
          const candidate most = reduce_max(best[m][i], 4);
          const index_t r = shape::row(m, 2 * i);
          if (lane() % 4 == 0 && r < joiners) {
            shared.best[r] = most;
          }
        }
      }
      for (index_t c0 = 0; c0 < some; c0 += shape::columns) {
        each_cosine(shared, h, order + w0, c0, some, own,
                    [&](index_t m, index_t j, index_t column, float u) {
                      const index_t r = shape::row(m, j);
                      if (r < joiners) {
                        shared.among[r * joiners + c0 + column] = u;
                      }
                    });
      }
      sync_block();
      if (warp() == 0) {
        const index_t all = decide(shared, h, order + w0, some, leaders, led);
        if (lane() == 0) {
          shared.leaders[0] = all;
        }
      }
      sync_block();
      led = shared.leaders[0];
    }
  }

 private:
  /// The slots' cosines with one tile of others, each to `take(m, j, column, cosine)`.
  template <class Take>
  KVFOLD_DEVICE void each_cosine(shared_memory& shared, index_t h, const index_t* slots, index_t c0,
                                 index_t count, const float (&own)[shape::row_tiles][2],
                                 Take take) const {
    const auto keys = cache.keys.of(h);
    sync_block();  // the last tile is used up
    shape::template load<shape::columns>(
        shared.leading,
        [&](index_t c) { return c0 + c < count ? keys.at(slots[c0 + c]) : nullptr; },
        cache.keys.data, cache.dim, aligned);
    for (index_t c = thread_index(); c < shape::columns; c += threads) {
      const index_t s = c0 + c < count ? slots[c0 + c] : -1;
      shared.slot[c] = s;
      shared.norm[c] = s < 0 ? 0.0F : norm[cache.slot(h, s)];
    }
    commit_async();
    wait_async<0>();
    sync_block();
    typename shape::products x;
    shape::multiply(shared.joining, shared.leading, cache.dim, x);
    KVFOLD_UNROLL
    for (index_t c = 0; c < shape::column_tiles; ++c) {
      KVFOLD_UNROLL
      for (index_t j = 0; j < 4; ++j) {
        const index_t column = shape::column(c, j);
        const float bb = shared.norm[column];
        KVFOLD_UNROLL
        for (index_t m = 0; m < shape::row_tiles; ++m) {
          take(m, j, column, cosine_similarity{}(x[m][c][j], own[m][j / 2], bb));
        }
      }
    }
  }

  /// One after another, by a warp with two slots a lane. Returns how many leaders there are then.
  KVFOLD_DEVICE index_t decide(shared_memory& shared, index_t h, const index_t* order, index_t some,
                               index_t* leaders, index_t led) const {
    candidate best[2] = {shared.best[lane()], shared.best[lane() + 32]};
    for (index_t w = 0; w < some; ++w) {
      const candidate mine = shuffle(w < 32 ? best[0] : best[1], w % 32);
      const index_t s = order[w];
      const float u = mine == 0 ? 0.0F : number_of(static_cast<unsigned>(mine >> 32));
      const bool joins = mine != 0 && u >= similarity;
      if (lane() == 0) {
        of.into[cache.slot(h, s)] = joins ? most_slot(mine) : s;
        of.similarity[cache.slot(h, s)] = u;
        if (!joins) {
          leaders[led] = s;
        }
      }
      if (!joins) {
        ++led;
        KVFOLD_UNROLL
        for (index_t i = 0; i < 2; ++i) {
          const index_t other = lane() + 32 * i;
          if (other > w && other < some) {
            const float near = shared.among[other * joiners + w];
            const candidate it = most_candidate(ordered(near), s);
            best[i] = it > best[i] ? it : best[i];
          }
        }
      }
    }
    return led;
  }
};

/// Only the `n − target` most similar joins are kept, ties to the lower slot; the other slots stay
/// separate. A block a head. The lists are used up.
template <class Scalar>
struct limit_joins {
  static constexpr index_t threads = 512;
  struct shared_memory {
    radix_select_memory radix;
    of_warps<index_t, threads> number;
    prefix_memory<threads> prefix;
  };

  cache_view<Scalar> cache;
  keep_evict_partition of;
  head_budgets limits;

  /// Grid: heads.
  KVFOLD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t n = cache.length[h], most = n - limits.of(h).target;
    if (of.rows[h] < 0) {
      return;
    }
    index_t* const into = of.into + cache.slot(h, 0);
    const auto joined = [&](index_t s) { return into[s] != s; };
    const auto order = [&](index_t s) { return ordered(of.similarity[cache.slot(h, s)]); };
    index_t count = 0;
    for (index_t s = thread_index(); s < n; s += threads) {
      count += joined(s) ? 1 : 0;
    }
    if (block_sum(shared.number, count) > most) {
      block_radix_select<threads>::each_but_highest(shared.radix, shared.prefix, n, most, joined,
                                                    order, [&](index_t s) { into[s] = s; });
    }
    if (thread_index() == 0) {
      of.removed_count[h] = 0;
    }
  }
};

/// What a row weighs, ln Σ w, by its anchor. For `weigh_rows`.
struct row_votes {
  float* weight;  // [heads, capacity]

  KVFOLD_DEVICE bool alone(const head_context&, index_t, bool) const { return true; }
  template <class Scalar>
  KVFOLD_DEVICE void operator()(const cache_view<Scalar>& cache, index_t h,
                                const head_context& head, merge_source* row, index_t size,
                                float&) const {
    const auto made = vote_merge::of_row(head, row, size);
    if (lane() == 0) {
      weight[cache.slot(h, row[0].source)] = static_cast<float>(made.a);
    }
  }
};

}  // namespace kvfold::cuda::detail
