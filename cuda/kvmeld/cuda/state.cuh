// SPDX-License-Identifier: MIT
/// A policy's state in device memory, and in pages while its requests wait.
#pragma once

#include "kvmeld/cuda/memory/saved_heads.cuh"
#include "kvmeld/cuda/memory/view.cuh"
#include "kvmeld/cuda/policies/device_policy.cuh"

namespace kvmeld::cuda::detail {

/// Initial numbers in all columns, zeros in the memory.
template <class Scalar>
struct clear_state {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  cache_view<Scalar> cache;
  state_view state;

  /// Grid: heads, any number of blocks that share a head.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    const index_t first = block_y() * threads + thread_index();
    const index_t step = grid_y() * threads;
    for (index_t c = 0; c < state.count; ++c) {
      for (index_t s = first; s < cache.stride(); s += step) {
        state.column(c, h)[s] = state.initial[c];
      }
    }
    for (index_t i = first; i < state.floats; i += step) {
      state.memory_of(h)[i] = 0;
    }
  }
};

}  // namespace kvmeld::cuda::detail

namespace kvmeld::cuda {

namespace detail {

/// The state of `policy` in `from`: `[columns, heads, capacity]` and `[heads, floats]`.
template <class Policy, class Scalar>
state_view allocate_state(workspace_allocator& from, const Policy& policy,
                          const cache_view<Scalar>& cache) {
  state_view state;
  const auto columns = columns_of(policy);
  expects(columns.size() <= max_columns, "cuda state: expected ", Policy::name(), " with at most ",
          max_columns, " columns, got ", columns.size());
  const std::size_t floats = memory_of(policy, cache), heads = shape_of(cache).all_heads(),
                    slots = heads * static_cast<std::size_t>(cache.stride());
  expects(floats < 1U << 30, "cuda state: expected ", Policy::name(),
          " with fewer than 2^30 floats of ", "memory per head, got ", floats);
  for (const auto& column : columns) {
    state.merges[state.count] = column.reduce, state.initial[state.count] = column.initial;
    ++state.count;
  }
  state.columns = from.take<float>(columns.size() * slots);
  state.head_stride = cache.stride();
  state.column_stride = static_cast<std::ptrdiff_t>(slots);
  state.memory = from.take<float>(heads * floats);
  state.floats = static_cast<index_t>(floats), state.memory_stride = state.floats;
  return state;
}

}  // namespace detail

/// Bytes of the state of all heads of `cache`.
template <class Policy, class Scalar>
std::size_t state_bytes(const Policy& policy, const cache_view<Scalar>& cache) {
  workspace_allocator count;
  detail::allocate_state(count, policy, cache);
  return count.used();
}

/// Every head's state as it is before anything was observed. One launch.
template <class Scalar>
void clear(const state_view& state, const cache_view<Scalar>& cache, stream stream) {
  check(cache), check(state, cache, 0, static_cast<std::size_t>(state.floats), "cuda clear");
  const index_t most = state.floats > cache.stride() ? state.floats : cache.stride();
  const index_t blocks = (most + 1023) / 1024;
  launch(detail::clear_state<Scalar>{cache, state},
         {cache.blocks(), static_cast<unsigned>(blocks < 256 ? blocks : 256)}, stream);
}

/// The state of `policy` for all heads of `cache`, in the caller's device memory of `state_bytes`,
/// aligned to 256 bytes; cleared on `stream` in one launch. `kvmeld::error`: a policy with more
/// than `max_columns` columns, too little memory.
template <class Policy, class Scalar>
state_view make_state_view(const Policy& policy, const cache_view<Scalar>& cache, workspace memory,
                           stream stream) {
  check(cache);
  workspace_allocator from(memory);
  const state_view state = detail::allocate_state(from, policy, cache);
  from.check("cuda make_state_view", "state_bytes");
  clear(state, cache, stream);
  return state;
}

}  // namespace kvmeld::cuda
