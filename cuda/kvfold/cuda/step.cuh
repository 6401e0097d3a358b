/// Decode attention that observes as it goes, and the whole decode step.
#pragma once

#include <cstddef>  // std::size_t

#include "kvfold/cuda/observe.cuh"

namespace kvfold::cuda {

/// Bytes of workspace that `attend_observe` and `step` need for caches of this shape.
inline std::size_t workspace_bytes(index_t heads, index_t capacity, index_t group, index_t dim) {
  carver count;
  detail::carve(count, heads, capacity, group, dim);
  return count.used();
}
template <class Scalar>
std::size_t workspace_bytes(const cache_view<Scalar>& cache) {
  return workspace_bytes(cache.heads, cache.capacity, cache.group, cache.dim);
}

namespace detail {

template <class Scalar, class Rule>
void attend_observe_leave(const Rule& rule, const cache_view<Scalar>& cache,
                          const state_view& state, const Scalar* queries,
                          const newcomers<Scalar>& fresh, const step_options& options, Scalar* out,
                          float* log_sum_exp, workspace memory, stream stream) {
  check(cache), check(state);
  expects(queries != nullptr && out != nullptr, "cuda attend: queries and out [", cache.heads, ", ",
          cache.group, ", ", cache.dim, "] expected, null came");
  carver from(memory);
  const partial_attention partial =
      carve(from, cache.heads, cache.capacity, cache.group, cache.dim);
  from.check("cuda attend");
  attend_splits(cache, queries, fresh, partial, stream);
  launch(observe_and_leave<Scalar, Rule>{cache, state, partial, rule, options, out, log_sum_exp,
                                         cache.aligned()},
         {static_cast<unsigned>(cache.heads), static_cast<unsigned>(partial.tiles)}, stream);
}

}  // namespace detail

/// Softmax attention with log-mass of one query for every query head, and in the same pass every
/// slot's probability into the policy's score:
///
///     ℓ_s = scale · q·k_s + log_mass_s      p = softmax(ℓ)      out = Σ_s p_s v_s
///
/// `queries`, `out` `[heads, group, dim]`; `log_sum_exp` `[heads, group]` or null. K and V are read
/// once; the logits, 4 · group bytes a slot, are written and read again. Two launches. An empty
/// head's output is 0.
template <class Scalar, class Rule>
void attend_observe(const Rule& rule, const cache_view<Scalar>& cache, const state_view& state,
                    const Scalar* queries, Scalar* out, float* log_sum_exp, workspace memory,
                    stream stream) {
  detail::attend_observe_leave(rule, cache, state, queries, {}, {}, out, log_sum_exp, memory,
                               stream);
}

/// Attention alone.
template <class Scalar>
void attend(const cache_view<Scalar>& cache, const Scalar* queries, Scalar* out, float* log_sum_exp,
            workspace memory, stream stream) {
  attend_observe(no_rule{}, cache, state_view{}, queries, out, log_sum_exp, memory, stream);
}

/// One decode step of all heads: append `fresh`, attend, observe, and back to the budget: when a
/// head holds one slot more than `budget.target`, one leaves and the newcomer takes its place.
/// Equals `kvfold::step`. Two launches; lengths stay on the device. A head that has no room for its
/// newcomer gives NaN and stays as it is. Refused: a budget that frees several slots at once
/// (`trigger`), policies and modes without a CUDA path.
template <class Policy, class Scalar>
void step(const Policy& policy, const cache_view<Scalar>& cache, const state_view& state,
          const Scalar* queries, const newcomers<Scalar>& fresh, const budget& budget, Scalar* out,
          workspace memory, stream stream) {
  expects(fresh.keys != nullptr && fresh.values != nullptr, "cuda step: keys and values [",
          cache.heads, ", ", cache.dim, "] of the newcomers expected, null came");
  expects(budget.target > 0 && budget.target < cache.capacity, "cuda step: a target of 1 to ",
          cache.capacity - 1, " expected (room for the newcomer), ", budget.target, " came");
  expects(budget.trigger_length() == budget.target + 1,
          "cuda step: a trigger of target + 1 expected, ", budget.trigger, " came");
  detail::attend_observe_leave(rule_of(policy, budget), cache, state, queries, fresh,
                               {true, budget.target}, out, nullptr, memory, stream);
}

}  // namespace kvfold::cuda
