// SPDX-License-Identifier: MIT
/// Rows of a plan that is too long: which of them go.
#pragma once

#include "kvmeld/cuda/device/block_radix_select.cuh"
#include "kvmeld/cuda/device/one_after_other.cuh"
#include "kvmeld/cuda/memory/head_budgets.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/merge/rows.cuh"
#include "kvmeld/cuda/score/rule.cuh"

namespace kvmeld::cuda::detail {

/// Rows that `drop_rows` never drops: those of anchors that a rule protects, or of slots that were
/// marked as apart.
template <class Rule>
struct protected_rows {
  Rule rule;
  KVMELD_DEVICE void of_target(index_t target) { rule.of_target(target); }
  KVMELD_DEVICE bool operator()(const head_context& head, index_t s, index_t) const {
    return rule.is_protected(head, s);
  }
};
struct marked_rows {
  KVMELD_DEVICE bool operator()(const head_context&, index_t, index_t into) const {
    return (into & keep_evict_partition::fresh) != 0;
  }
};

/// More rows than the target: of those that nothing protects the heaviest stay, and the others go
/// with all their members. A block a head; false: none goes.
template <class Scalar, class Protected>
struct drop_rows {
  static constexpr index_t threads = 512;
  using shared_memory = selection_memory<threads>;

  cache_view<Scalar> cache;
  state_view state;
  Protected any;
  keep_evict_partition of;
  head_budgets limits;
  const float* weight;  // [heads, capacity] of the anchors

  /// Grid: heads.
  KVMELD_DEVICE bool operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t n = cache.length[h], target = limits.of(h).slots;
    if (of.rows[h] <= target) {
      return false;
    }
    const auto& is_protected = under_target(any, target);
    const head_context head = context_of(cache, state, h, newest_of(shared.number, cache, h, n));
    index_t* const into = of.into + cache.slot(h, 0);
    index_t* const drops = of.nearest.into + cache.slot(h, 0);
    const auto competes = [&](index_t s) {
      return (into[s] & ~keep_evict_partition::fresh) == s && !is_protected(head, s, into[s]);
    };
    const auto order = [&](index_t s) { return ordered(weight[cache.slot(h, s)]); };
    index_t held = 0;
    for (index_t s = thread_index(); s < n; s += threads) {
      held += is_protected(head, s, into[s]) ? 1 : 0;
      drops[s] = 0;
    }
    held = block_sum(shared.number, held);
    block_radix_select<threads>::each_but_highest(shared.radix, shared.prefix, n, target - held,
                                                  competes, order,
                                                  [&](index_t s) { drops[s] = 1; });
    sync_block();
    for (index_t s = thread_index(); s < n; s += threads) {
      if (drops[into[s] & ~keep_evict_partition::fresh] != 0) {
        into[s] = keep_evict_partition::evicted;
      }
    }
    return true;
  }
};

/// Makes a plan's rows anew where there are more of them than the target. One launch.
template <class Scalar, class Protected>
void remake_rows(const cache_view<Scalar>& cache, const state_view& state,
                 const keep_evict_partition& of, const plan_view& plan,
                 const Protected& is_protected, const head_budgets& limits, const float* weight,
                 stream stream) {
  using drop = drop_rows<Scalar, Protected>;
  using make = make_rows<Scalar, join_all>;
  launch(one_after_other<drop, make>{{cache, state, is_protected, of, limits, weight},
                                     {cache, state, of, plan, {}}},
         {cache.blocks()}, stream);
}

}  // namespace kvmeld::cuda::detail
