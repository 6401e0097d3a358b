// SPDX-License-Identifier: MIT
/// KeepKV's prompt: merged first, then evicted. In descending order of weight, each slot joins its
/// most similar leader or becomes one.
#pragma once

#include "kvmeld/cuda/device/block_radix_select.cuh"
#include "kvmeld/cuda/device/block_sort.cuh"
#include "kvmeld/cuda/memory/head_budgets.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/policies/keepkv/rule.cuh"

namespace kvmeld::cuda::detail {

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
  index_t* ends;  // [heads, capacity + 1]: `join_leaders`

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t n = cache.length[h], target = limits.of(h).slots;
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
    const index_t held = block_total(shared.sort.number, n, [&](index_t s) {
      const bool is_protected = mine.is_protected(head, s);
      of.into[cache.slot(h, s)] = is_protected ? s : keep_evict_partition::evicted;
      order[s] = s;
      return is_protected;
    });
    // Four passes or none: it ends where it began. Those held come last.
    block_sort(shared.sort, order, of.nearest.into + cache.slot(h, 0), n, ~0U,
               [&](index_t s) { return mine.is_protected(head, s) ? ~0U : ~mine.order(head, s); });
    for (index_t i = thread_index(); i < held; i += threads) {
      of.kept[cache.slot(h, i)] = order[n - held + i];
    }
    if (thread_index() == 0) {
      of.rows[h] = 0, of.kept_count[h] = held, of.removed_count[h] = n - held;
      ends[cache.bound(h, 0)] = held;
    }
  }
};

/// Only the `n − target` most similar joins are kept, ties to the lower slot; the other slots stay
/// separate. A block a head. The lists are used up.
template <class Scalar>
struct limit_joins {
  static constexpr index_t threads = 512;
  using shared_memory = selection_memory<threads>;

  cache_view<Scalar> cache;
  keep_evict_partition of;
  head_budgets limits;

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t n = cache.length[h], most = n - limits.of(h).slots;
    if (of.rows[h] < 0) {
      return;
    }
    index_t* const into = of.into + cache.slot(h, 0);
    const auto joined = [&](index_t s) { return into[s] != s; };
    const auto order = [&](index_t s) { return ordered(of.similarity[cache.slot(h, s)]); };
    if (block_total(shared.number, n, joined) > most) {
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

  KVMELD_DEVICE bool alone(const head_context&, index_t, bool) const { return true; }
  template <class Scalar>
  KVMELD_DEVICE void operator()(const cache_view<Scalar>& cache, index_t h,
                                const head_context& head, merge_source* row, index_t size, float&,
                                const auto& team) const {
    const auto made = vote_merge::of_row(head, row, size, team);
    if (team.index() == 0) {
      weight[cache.slot(h, row[0].source)] = static_cast<float>(made.a);
    }
  }
};

}  // namespace kvmeld::cuda::detail
