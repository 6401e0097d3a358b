// SPDX-License-Identifier: MIT
/// kvmerger on the device.
#pragma once

#include "kvmeld/cuda/merge/drop_rows.cuh"
#include "kvmeld/cuda/policies/device_policy.cuh"
#include "kvmeld/cuda/policies/kvmerger/name_runs.cuh"
#include "kvmeld/cuda/policies/kvmerger/neighbours.cuh"
#include "kvmeld/cuda/policies/kvmerger/weights.cuh"
#include "kvmeld/policies/kvmerger.hpp"

namespace kvmeld::cuda {

template <>
struct device_policy<kvmerger> : evicting_policy {
  /// Refused: a policy by `sharing`, whose scores only the CPU measures.
  static kvmerger_rule rule(const kvmerger& policy, const attention_spec&) {
    expects(errc::unsupported, policy.share_slots == 0,
            "cuda kvmerger: expected heads with budgets of their own, got ", policy.share_slots,
            " slots to share");
    return {{policy.combine, policy.sinks, policy.recent},
            policy.heavy,
            policy.joins == decltype(policy.joins)::threshold,
            policy.epsilon,
            policy.sigma,
            policy.scale_values,
            policy.gaps_break};
  }
  /// Seven launches: neighbours joined into runs, rows, and, where they are too many, fewer rows.
  template <class Scalar>
  static void plan(const kvmerger_rule& rule, const cache_view<Scalar>& cache,
                   const state_view& state, const head_budgets& limits,
                   const detail::plan_memory& work, stream stream) {
    const auto heads = cache.blocks();
    const index_t rows = limits.most_target();
    const detail::keep_evict_partition& d = work.divided;
    const bool aligned = cache.aligned();
    detail::select_into(d, rule, cache, state, limits, detail::order_by_position<Scalar>{cache, d},
                        stream);
    using cosines = detail::pair_cosines<Scalar>;
    launch(cosines{cache, d, rule.gaps_break, aligned},
           {heads, blocks_of(cache.capacity, cosines::pairs)}, stream);
    using name = detail::name_runs<Scalar>;
    using make = detail::make_rows<Scalar, detail::join_all>;
    launch(detail::one_after_other<name, make>{{cache, state, d, limits, rule.by_threshold,
                                                rule.epsilon},
                                               {cache, state, d, work.plan, {}}},
           {heads}, stream);
    detail::weigh(cache, state, d, work.plan, detail::row_scores{d.similarity}, rows, stream);
    detail::remake_rows(cache, state, d, work.plan, detail::marked_rows{}, limits, d.similarity,
                        stream);
    detail::weigh(cache, state, d, work.plan,
                  detail::gaussian_weights{rule.sigma, rule.scale_values, aligned}, rows, stream);
    apply(work.plan, cache, state, stream);
  }
};

}  // namespace kvmeld::cuda
