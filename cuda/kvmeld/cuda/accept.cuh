// SPDX-License-Identifier: MIT
/// Tokens that an engine drafted, and has verified by its own attention.
#pragma once

#include "kvmeld/cuda/step.cuh"

namespace kvmeld::cuda {

namespace detail {

/// The heads of places that accept more than `before` tokens.
struct list_accepting {
  static constexpr index_t threads = 128;
  struct shared_memory {};

  const index_t* from;  // [places] heads; null: all
  const index_t* accepted;
  index_t places, before;
  index_t* to;

  /// Grid: stretches of `threads` places.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t i = place_of_block() * threads + thread_index();
    if (i < places) {
      to[i] = accepted[i] <= before ? -1 : from == nullptr ? i : from[i];
    }
  }
};

}  // namespace detail

/// The first `accepted [heads]` of `tokens` drafted tokens of each head that a call runs, on the
/// device, as so many calls of `step`, to the bit; the others were never there. Equals
/// `compressor::accept`. `queries`, `out` `[tokens, heads, group, dim]`, `keys` and `values`
/// `[tokens, heads, dim]`, by place; outputs that are not accepted stay as they were. `list
/// [heads]` is scratch. A launch and those of a step per drafted token. Refused, with `list`
/// written: as of `step`.
template <class Policy, class Scalar, budgets Budgets = budget>
void accept(const Policy& policy, const cache_view<Scalar>& cache, const state_view& state,
            const Scalar* queries, const new_tokens<Scalar>& drafted, index_t tokens,
            const index_t* accepted, const Budgets& limits, Scalar* out, index_t* list,
            workspace memory, stream stream) {
  expects(tokens >= 0 && accepted != nullptr && list != nullptr && drafted.keys != nullptr &&
              drafted.values != nullptr,
          "cuda accept: expected at least 0 tokens, how many are accepted, and a list, got ",
          tokens, " tokens or null");
  const auto places = static_cast<index_t>(cache.blocks());
  using kernel = detail::list_accepting;
  for (index_t t = 0; t < tokens; ++t) {
    const std::ptrdiff_t row = std::ptrdiff_t{t} * places * cache.dim, rows = row * cache.group;
    launch(kernel{cache.active, accepted, places, t, list}, {blocks_of(places, kernel::threads)},
           stream);
    step(policy, cache.with_active(list, places), state, queries + rows,
         new_tokens<Scalar>{drafted.keys + row, drafted.values + row}, limits, out + rows, memory,
         stream);
  }
}

}  // namespace kvmeld::cuda
