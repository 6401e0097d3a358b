// SPDX-License-Identifier: MIT
/// What the operators do with tensors on a GPU, without a word of PyTorch: one type for each
/// scalar, so that nvcc compiles them side by side.
#pragma once

#include <cstddef>  // std::size_t
#include <span>
#include <string_view>

#include "cache_tensors.hpp"
#include "kvmeld/any_policy.hpp"
#include "kvmeld/cuda/memory/workspace.cuh"
#include "kvmeld/make_policy.hpp"

namespace kvmeld_torch {

/// What a call works on, and in. Lengths and everything else of `cache` are on the device.
struct device_call {
  cache_tensors cache;
  const index_t* active = nullptr;  ///< `[active_count]` heads that it is for; null: all
  index_t active_count = 0;
  kvmeld::cuda::workspace memory = {};
  void* stream = nullptr;  ///< a cudaStream_t
};

/// A budget for each head, here and on the device; `device` null: all the same.
struct device_budgets {
  std::span<const kvmeld::budget> host;
  const kvmeld::budget* device = nullptr;
};

/// Calls for caches of one scalar. Refused: policies and modes without kernels, and what the
/// kernels refuse.
template <kvmeld::storage Type>
struct device_calls {
  /// Bytes for `compress` on so many queries, with so many before them, to so many slots, for
  /// `step` and for `attend`.
  static std::size_t workspace_bytes(const kvmeld::any_policy& policy, const device_call& call,
                                     index_t queries, index_t target, index_t before = 0);
  /// ... for `observe`.
  static std::size_t observe_bytes(const kvmeld::any_policy& policy, const device_call& call,
                                   index_t queries, index_t before);

  static void observe(const kvmeld::any_policy& policy, const device_call& call,
                      const query_layout& queries);
  static void compress(const kvmeld::any_policy& policy, const device_call& call,
                       const query_layout& queries, const device_budgets& budgets);
  /// `q`, `out` `[heads, group, dim]`, `k`, `v` `[heads, dim]`, of the cache's scalar.
  static void step(const kvmeld::any_policy& policy, const device_call& call, const void* q,
                   const void* k, const void* v, const device_budgets& budgets, void* out);
  static void attend(const kvmeld::any_policy& policy, const device_call& call, const void* q,
                     void* out, float* log_sum_exp);
  /// `out [heads, group, n, dim]`, `position [n]`.
  static void lookahead(const device_call& call, const query_layout& queries,
                        const kvmeld::lookahead_options& options, void* out, index_t* position);
};
/// How many queries `lookahead` makes of so many.
index_t device_lookahead_count(index_t queries, const kvmeld::lookahead_options& options);

extern template struct device_calls<kvmeld::storage::f32>;
extern template struct device_calls<kvmeld::storage::f16>;
extern template struct device_calls<kvmeld::storage::bf16>;

}  // namespace kvmeld_torch
