// SPDX-License-Identifier: MIT
/// snapkv on the device.
#pragma once

#include "kvmeld/cuda/device/block_sort.cuh"
#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/cuda/policies/evicting_rules.cuh"
#include "kvmeld/policies/snapkv.hpp"

namespace kvmeld::cuda::detail {

/// SnapKV's prompt score, a block a head: the sums, averaged over `kernel` neighbours in position
/// among the slots before the window (listing 1), as the past; nothing as the present.
template <class Scalar>
struct pool_sums {
  static constexpr index_t threads = 512;
  struct shared_memory {
    sort_memory<threads> sort;
  };

  cache_view<Scalar> cache;
  state_view state;
  window_rule rule;
  index_t kernel;
  bool count_border;
  const float* sums;       // [heads, capacity]
  index_t *order, *spare;  // [heads, capacity] scratch

  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const index_t n = cache.length[h];
    if (n == 0) {
      return;
    }
    const head_context head =
        context_of(cache, state, h, newest_of(shared.sort.number, cache, h, n));
    const protection in_window{0, rule.window, head.newest};
    const float* const raw = sums + cache.slot(h, 0);
    index_t* const list = order + cache.slot(h, 0);
    const index_t count = block_total(shared.sort.number, n, [&](index_t s) {
      head.column(window_rule::past, s) = raw[s];
      head.column(window_rule::current, s) = 0;
      list[s] = s;
      return !in_window(head.position[s]);
    });
    const index_t* const by_position =  // those in the window come last
        block_sort(shared.sort, list, spare + cache.slot(h, 0), n,
                   static_cast<unsigned>(head.newest),
                   [&](index_t s) { return static_cast<unsigned>(head.position[s]); });
    for (index_t i = thread_index(); i < count; i += threads) {
      head.column(window_rule::past, by_position[i]) =
          pooled(raw, by_position, count, i, kernel, count_border);
    }
    if (thread_index() == 0) {
      head.memory[0] = 0;
    }
  }
};

}  // namespace kvmeld::cuda::detail

namespace kvmeld::cuda {

template <>
struct device_policy<snapkv> : evicting_policy {
  static window_rule rule(const snapkv& policy, const attention_spec&) {
    return {policy.combine, policy.sinks, policy.window};
  }
  template <class Scalar>
  static void observe(const snapkv& policy, const window_rule& rule,
                      const cache_view<Scalar>& cache, const state_view& state,
                      const query_rows<row_number<Scalar>>& queries,
                      const detail::prompt_memory<window_rule>& work, stream stream) {
    detail::column_scores(cache, queries.reference(policy.window), {.combine = rule.combine},
                          {.total = work.sums}, work.measure, stream);
    launch(detail::pool_sums<Scalar>{cache, state, rule, policy.kernel, policy.count_border,
                                     work.sums, work.order, work.spare},
           {cache.blocks()}, stream);
  }
};

}  // namespace kvmeld::cuda
