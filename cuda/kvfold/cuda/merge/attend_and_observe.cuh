/// Attention that observes: the first two of a step's launches.
#pragma once

#include <type_traits>  // std::remove_cvref_t

#include "kvfold/cuda/merge/observe_and_remove.cuh"
#include "kvfold/cuda/score/attend_splits.cuh"
#include "kvfold/cuda/score/centres_in_tiles.cuh"
#include "kvfold/cuda/score/nearest_in_tiles.cuh"

namespace kvfold::cuda::detail {

/// Both launches: attention over all splits, then what `options` says of the second, which is left
/// out where they say nothing.
template <class Scalar, class Rule>
void attend_and_observe(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                        const Scalar* queries, const new_tokens<Scalar>& fresh,
                        const step_options& options, partial_attention partial, Scalar* out,
                        float* log_sum_exp, stream stream) {
  expects(queries != nullptr && out != nullptr, "cuda attend: queries and out [", cache.heads, ", ",
          cache.group, ", ", cache.dim, "] expected, null came");
  partial.logits = Rule::observes ? partial.logits : nullptr;
  const auto attend = [&](const auto& masses) {
    attention_call<Scalar, std::remove_cvref_t<decltype(masses)>> call{
        cache, queries, fresh, partial, out, log_sum_exp, masses};
    if constexpr (predicts_evicted<Rule>) {
      if (options.removes && fits_tiles(call)) {
        partial.predicted = state.predicted, partial.predicted_stride = state.predicted_stride;
        call.to = partial;
      }
    }
    if constexpr (seeks_nearest<Rule>) {
      attend_splits<nearest_in_tiles>(call, stream);
    } else if constexpr (shares_entries<Rule>) {
      attend_splits<centres_in_tiles>(call, stream);
    } else {
      attend_splits<nothing_compared>(call, stream);
    }
  };
  if constexpr (shares_entries<Rule>) {
    attend(rule.masses(state, cache.capacity));
  } else {
    attend(log_masses{});
  }
  if (Rule::observes || remembers<Rule> || options.appended || partial.splits > 1) {
    launch_early(observe_and_remove<Scalar, Rule>{cache, state, partial, rule, options, queries,
                                                  out, log_sum_exp, cache.aligned()},
                 {cache.blocks(), static_cast<unsigned>(partial.tiles)}, stream);
  }
}

}  // namespace kvfold::cuda::detail
