// SPDX-License-Identifier: MIT
/// Removing one slot in a step. By a block.
#pragma once

#include "kvmeld/cuda/score/rule.cuh"

namespace kvmeld::cuda::detail {

/// Everything that a slot is. A block has about as many threads as the two rows have elements.
template <index_t Threads, class Scalar>
KVMELD_DEVICE void move_slot(const cache_view<Scalar>& cache, const state_view& state,
                             const head_context& head, index_t h, index_t to, index_t from) {
  const auto keys = cache.keys.of(h), values = cache.values.of(h);
  const auto size = [&] { return row_elements<Scalar>(cache.dim); };  // no register for it
  KVMELD_ROLLED
  for (index_t e = thread_index(); e < 2 * size(); e += Threads) {
    const auto row = [&](index_t s) {
      return e < size() ? keys.at(s) + e : values.at(s) + (e - size());
    };
    *row(to) = *row(from);
  }
  if (thread_index() < state.count) {
    head.column(thread_index(), to) = head.column(thread_index(), from);
  }
  if (thread_index() == 0) {
    cache.log_mass_of(h)[to] = cache.log_mass_of(h)[from];
    cache.position_of(h)[to] = cache.position_of(h)[from];
  }
}

/// Weights of two rows that become one.
struct two_weights {
  float kept = 1, removed = 0;
};

/// How one slot goes into another.
struct joining {
  two_weights keys, values;
  float log_mass = 0;  ///< of the merged one
};

/// Log-mass and columns of `removed` into `into`'s.
template <class Scalar>
KVMELD_DEVICE void merge_numbers(const cache_view<Scalar>& cache, const state_view& state,
                                 const head_context& head, index_t h, index_t into, index_t removed,
                                 const joining& how) {
  if (thread_index() < state.count) {
    float& x = head.column(thread_index(), into);
    x = kvmeld::detail::reduced_stat(state.merges[thread_index()], x,
                                     head.column(thread_index(), removed));
  }
  if (thread_index() == 0) {
    cache.log_mass_of(h)[into] = how.log_mass;
  }
}

/// Rows, log-mass and columns of `removed` into `into`'s. A barrier before and one after.
template <index_t Threads, class Scalar>
KVMELD_DEVICE void merge_slot(const cache_view<Scalar>& cache, const state_view& state,
                              const head_context& head, index_t h, index_t into, index_t removed,
                              const joining& how) {
  sync_block();  // all have read what `how` was made from
  const auto merge = [&](const head_rows<Scalar>& rows, const two_weights& w) {
    Scalar* const to = rows.at(into);
    const Scalar* const away = rows.at(removed);
    for (index_t i = thread_index(); i < cache.dim; i += Threads) {
      to[i] = from_float<Scalar>(w.kept * to_float(to[i]) + w.removed * to_float(away[i]));
    }
  };
  merge(cache.keys.of(h), how.keys);
  merge(cache.values.of(h), how.values);
  merge_numbers(cache, state, head, h, into, removed, how);
  sync_block();
}

/// By one thread, when a step is done with a head.
template <class Scalar>
KVMELD_DEVICE void count_slots(const cache_view<Scalar>& cache, index_t h, index_t left) {
  cache.length[h] = left;
  cache.next_position[h] += 1;
}

}  // namespace kvmeld::cuda::detail
