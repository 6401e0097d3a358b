// SPDX-License-Identifier: MIT
/// Decode attention with log-mass, which observes as it goes.
#pragma once

#include "kvmeld/cuda/merge/attend_and_observe.cuh"

namespace kvmeld::cuda {

/// Softmax attention with log-mass of one query for every query head, and in the same pass every
/// slot's probability into the policy's score:
///
///     ℓ_s = scale · q·k_s + log_mass_s      p = softmax(ℓ)      out = Σ_s p_s v_s
///
/// with the cache's soft cap and sinks where it has them, which are in the log-sum-exp.
/// `queries`, `out` `[heads, group, dim]`; `log_sum_exp` `[heads, group]` or null. K and V are read
/// once; the logits, 4 · group bytes a slot, are written and read again. Two launches, or one
/// (`step`). An empty head's output is 0.
template <class Scalar, class Rule>
void attend_observe(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                    const row_number<Scalar>* queries, row_number<Scalar>* out, float* log_sum_exp,
                    workspace memory, stream stream) {
  check(cache), detail::check_rule(rule, cache, state, "cuda attend");
  workspace_allocator from(memory);
  const auto work = detail::allocate_step(from, rule, detail::shape_of(cache), false);
  from.check("cuda attend");
  detail::attend_and_observe(rule, cache, state, queries, {}, {}, work.partial, out, log_sum_exp,
                             stream);
}

/// Attention alone.
template <class Scalar>
void attend(const cache_view<Scalar>& cache, const row_number<Scalar>* queries,
            row_number<Scalar>* out, float* log_sum_exp, workspace memory, stream stream) {
  attend_observe(no_rule{}, cache, state_view{}, queries, out, log_sum_exp, memory, stream);
}

}  // namespace kvmeld::cuda
