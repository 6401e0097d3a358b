// SPDX-License-Identifier: MIT
/// From each slot's destination to the rows of a plan.
#pragma once

#include "kvmeld/cuda/device/block_sort.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/score/rule.cuh"

namespace kvmeld::cuda::detail {

/// Every removed slot joins the nearest.
struct join_all {
  /// By the whole block: the least similarity at which slots join.
  template <class Scalar, index_t Threads>
  KVMELD_DEVICE float threshold(of_warps<double, Threads>&, const cache_view<Scalar>&,
                                const keep_evict_partition&, const state_view&, index_t) const {
    return lowest_score;
  }
};

/// Those at or above a similarity.
struct join_above {
  float similarity;
  bool fills_gap = false;  ///< of `make_rows`

  template <class Scalar, index_t Threads>
  KVMELD_DEVICE float threshold(of_warps<double, Threads>&, const cache_view<Scalar>&,
                                const keep_evict_partition&, const state_view&, index_t) const {
    return similarity;
  }
};

/// A block a head: removed slots go where `match` and `join` send them; then all slots of rows
/// are sorted by anchor, the anchor before its others, and those ascending, as
/// `kvmeld::for_each_row` has them. Every weight is 1 and every log-mass the anchor's: `weigh_rows`
/// comes after. The lists are scratch then.
///
/// Where `join.fills_gap` and one slot goes, the row of the last is in its place, as a step of the
/// library's has it: of the others none moves.
template <class Scalar, class Join>
struct make_rows {
  static constexpr index_t threads = 512;
  static constexpr index_t own = 8;  // slots of a thread in flight at once
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
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    if (from.rows[h] < 0) {
      return;
    }
    const index_t n = cache.length[h];
    index_t* const into = from.into + cache.slot(h, 0);
    index_t* const order = from.kept + cache.slot(h, 0);
    index_t* const spare = from.removed + cache.slot(h, 0);
    index_t gap = n;
    if constexpr (requires { join.fills_gap; }) {
      gap = join.fills_gap && from.removed_count[h] == 1 ? spare[0] : n;
    }
    send(h, join.threshold(shared.sum, cache, from, state, h));
    sync_block();
    index_t goes = 0;
    for (index_t base = thread_index(); base < n; base += threads * own) {
      index_t to[own];
      KVMELD_UNROLL
      for (index_t u = 0; u < own; ++u) {
        const index_t s = base + u * threads;
        to[u] = s < n ? into[s] : keep_evict_partition::evicted;
      }
      KVMELD_UNROLL
      for (index_t u = 0; u < own; ++u) {
        const index_t s = base + u * threads;
        if (s < n) {
          order[s] = s;
        }
        goes += to[u] != keep_evict_partition::evicted ? 1 : 0;
      }
    }
    goes = block_sum(shared.sort.number, goes);
    const auto key = [&](index_t s) {
      const index_t anchor = into[s] & ~keep_evict_partition::fresh,
                    to = gap < n && anchor == n - 1 ? gap : anchor;
      return into[s] == keep_evict_partition::evicted
                 ? 2U * static_cast<unsigned>(n)
                 : 2U * static_cast<unsigned>(to) + (anchor == s ? 0U : 1U);
    };
    const index_t* const sorted =
        block_sort(shared.sort, order, spare, n, 2U * static_cast<unsigned>(n), key);
    write(shared, h, sorted, goes);
  }

 private:
  /// Removed slots to the anchors that were found for them, those below `least` to none.
  KVMELD_DEVICE void send(index_t h, float least) const {
    const index_t count = from.removed_count[h];
    const std::ptrdiff_t first = cache.slot(h, 0);
    for (index_t base = thread_index(); base < count; base += threads * own) {
      index_t slot[own], to[own];
      float similarity[own];
      KVMELD_UNROLL
      for (index_t u = 0; u < own; ++u) {
        const index_t e = base + u * threads;
        slot[u] = e < count ? from.removed[first + e] : -1;
        to[u] = e < count ? from.nearest.into[first + e] : 0;
        similarity[u] = e < count ? from.nearest.similarity[first + e] : 0.0F;
      }
      KVMELD_UNROLL
      for (index_t u = 0; u < own; ++u) {
        if (slot[u] >= 0) {
          from.into[first + slot[u]] =
              similarity[u] < least ? keep_evict_partition::evicted : to[u];
          from.similarity[first + slot[u]] = similarity[u];
        }
      }
    }
  }

  /// Sources as they are sorted, and where rows begin. A warp takes `32 own` sources side by side.
  KVMELD_DEVICE void write(shared_memory& shared, index_t h, const index_t* sorted,
                           index_t goes) const {
    const std::ptrdiff_t first = cache.slot(h, 0);
    index_t* const begin = plan.begin + cache.bound(h, 0);
    index_t rows = 0;
    for (index_t base = 0, turn = 0; base < goes; base += threads * own, turn ^= 1) {
      const index_t e0 = base + warp() * 32 * own + lane();
      index_t slot[own], to[own];
      marked_places<own> leads;
      KVMELD_UNROLL
      for (index_t u = 0; u < own; ++u) {
        slot[u] = e0 + 32 * u < goes ? sorted[e0 + 32 * u] : 0;
      }
      KVMELD_UNROLL
      for (index_t u = 0; u < own; ++u) {
        to[u] = e0 + 32 * u < goes ? from.into[first + slot[u]] & ~keep_evict_partition::fresh : -1;
      }
      KVMELD_UNROLL
      for (index_t u = 0; u < own; ++u) {
        leads.mark(u, to[u] == slot[u]);
      }
      const block_prefixes before = leads.of_block(shared.sort.prefix, turn);
      float mass[own];
      KVMELD_UNROLL
      for (index_t u = 0; u < own; ++u) {
        mass[u] = to[u] == slot[u] ? cache.log_mass_of(h)[slot[u]] : 0.0F;
      }
      index_t row = rows + before.a;
      KVMELD_UNROLL
      for (index_t u = 0; u < own; ++u) {
        const index_t e = e0 + 32 * u, own_row = row + leads.below(u);
        if (e < goes) {
          plan.sources[first + e] = {slot[u], 1.0F, 1.0F};
        }
        if (to[u] == slot[u]) {
          begin[own_row] = e;
          plan.log_mass[first + own_row] = mass[u];
        }
        row += count_lanes(leads.lanes[u]);
      }
      rows += before.all_a;
    }
    if (thread_index() == 0) {
      begin[rows] = goes;
      plan.rows[h] = rows;
    }
  }
};

}  // namespace kvmeld::cuda::detail
