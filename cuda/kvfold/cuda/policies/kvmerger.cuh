/// kvmerger on the device.
#pragma once

#include "kvfold/cuda/policies/device_policy.cuh"
#include "kvfold/cuda/policies/kvmerger/runs.cuh"
#include "kvfold/cuda/search/drop_rows.cuh"
#include "kvfold/policies/kvmerger.hpp"

namespace kvfold::cuda {

template <>
struct device_policy<kvmerger> : evicting_policy {
  static kvmerger_rule rule(const kvmerger& policy, index_t) {
    return {{policy.combine, policy.sinks, policy.recent},
            policy.heavy,
            policy.joins == decltype(policy.joins)::threshold,
            policy.epsilon,
            policy.sigma,
            policy.scale_values,
            policy.gaps_break};
  }
  /// Ten launches: neighbours joined into runs, rows, and, where they are too many, fewer rows.
  template <class Scalar>
  static void plan(const kvmerger_rule& rule, const cache_view<Scalar>& cache,
                   const state_view& state, const head_budgets& limits,
                   const detail::plan_memory& work, stream stream) {
    const auto heads = cache.blocks();
    const index_t rows = limits.most_target();
    const detail::keep_evict_partition& d = work.divided;
    detail::select_into(d, rule, cache, state, limits, stream);
    launch(detail::order_by_position<Scalar>{cache, d}, {heads}, stream);
    using cosines = detail::pair_cosines<Scalar>;
    launch(cosines{cache, d, rule.gaps_break, cache.aligned()},
           {heads, static_cast<unsigned>((cache.capacity + cosines::pairs - 1) / cosines::pairs)},
           stream);
    launch(detail::name_runs<Scalar>{cache, state, d, limits, rule.by_threshold, rule.epsilon},
           {heads}, stream);
    detail::write_rows(cache, state, d, work.plan, detail::join_all{},
                       detail::row_scores{d.similarity}, rows, stream);
    launch(
        detail::drop_rows<Scalar, detail::marked_rows>{cache, state, {}, d, limits, d.similarity},
        {heads}, stream);
    detail::write_rows(cache, state, d, work.plan, detail::join_all{},
                       detail::gaussian_weights{rule.sigma, rule.scale_values}, rows, stream);
    apply(work.plan, cache, state, stream);
  }
};

}  // namespace kvfold::cuda
