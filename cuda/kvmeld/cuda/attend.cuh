// SPDX-License-Identifier: MIT
/// Decode attention with log-mass, which observes as it goes.
#pragma once

#include "kvmeld/cuda/merge/attend_and_observe.cuh"
#include "kvmeld/cuda/score/attend_latent.cuh"

namespace kvmeld::cuda {

/// Softmax attention with log-mass of one query for every query head, and in the same pass every
/// slot's probability into the policy's score:
///
///     ℓ_s = scale · q·k_s + log_mass_s      p = softmax(ℓ)      out = Σ_s p_s v_s
///
/// with the cache's soft cap and sinks where it has them, which are in the log-sum-exp.
/// `queries`, `out` `[heads, group, dim]`; `log_sum_exp` `[heads, group]` or null. K and V are read
/// once for 16 query heads of a group, which are a launch; the logits, 4 · group bytes a slot, are
/// written and read again by one more, or by the same (`step`). An empty head's output is 0. What
/// the view's spec says is computed only where the view has it too.
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

/// Attention over latent rows (MLA), half or bfloat16: the keys are the rows `[key_dim]` of
/// `cache.keys`, the values their first `cache.dim` numbers. `queries [heads, group, key_dim]`,
/// `out [heads, group, cache.dim]`. Rows at multiples of 16 bytes, a key_dim of 8, 16 ... 576, a
/// dim up to that and 512. Memory: `workspace_bytes(cache)`. One launch, two of several splits.
template <class Scalar>
void attend_latent(const cache_view<Scalar>& cache, index_t key_dim, const Scalar* queries,
                   Scalar* out, float* log_sum_exp, workspace memory, stream stream) {
  using kernel = detail::attend_latent_rows<Scalar>;
  cache_view<Scalar> others = cache;  // but for the dims
  others.dim = 1, others.values = others.keys;
  check(others);
  expects(key_dim > 0 && key_dim % 8 == 0 && key_dim <= kernel::key_depth && cache.dim > 0 &&
              cache.dim <= key_dim && cache.dim <= kernel::value_depth && cache.keys.aligned(),
          "cuda attend_latent: expected aligned rows, a key_dim of 8 to ", kernel::key_depth,
          " and a dim up to it and ", kernel::value_depth, ", got ", key_dim, " and ", cache.dim);
  expects(
      queries != nullptr && out != nullptr && reinterpret_cast<std::uintptr_t>(queries) % 4 == 0,
      "cuda attend_latent: expected queries and out, got null or unaligned");
  workspace_allocator from(memory);
  auto to = detail::allocate_step(from, no_rule{}, detail::shape_of(cache), false).partial;
  from.check("cuda attend_latent");
  to.logits = nullptr;
  launch(kernel{{cache, queries, {}, to, out, log_sum_exp, {}}, key_dim},
         {cache.blocks(), blocks_of(to.splits), blocks_of(cache.group, kernel::queries)}, stream);
  if (to.splits > 1) {
    launch_early(
        detail::observe_and_remove<Scalar, no_rule>{
            cache, {}, to, {}, {}, queries, out, log_sum_exp, cache.aligned()},
        {cache.blocks(), blocks_of(to.tiles)}, stream);
  }
}

}  // namespace kvmeld::cuda
