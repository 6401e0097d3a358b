// SPDX-License-Identifier: MIT
/// What the operators do with tensors on a GPU, without a word of PyTorch: one object for
/// each scalar, so that nvcc compiles them side by side.
#pragma once

#include <cstddef>  // std::size_t
#include <span>
#include <string_view>

#include "cache_tensors.hpp"
#include "kvmeld/cuda/memory/workspace.cuh"
#include "kvmeld/peers.hpp"

namespace kvmeld_torch {

/// What a call works on, and in. Lengths and everything else of `cache` are on the device.
struct device_call {
  cache_tensors cache;
  const index_t* active = nullptr;  ///< `[active_count]` heads that it is for; null: all
  index_t active_count = 0;
  const float* sink_logits = nullptr;  ///< `[heads, group]`, of all heads; null: none
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
class device_calls {
 public:
  using policy = kvmeld::any_policy_or_peer;

  /// Bytes for `compress` on so many queries, with so many before them, to so many slots, for
  /// `step` and for `attend`.
  virtual std::size_t workspace_bytes(const policy& p, const device_call& call, index_t queries,
                                      index_t target, index_t before) const = 0;
  /// ... for `observe`.
  virtual std::size_t observe_bytes(const policy& p, const device_call& call, index_t queries,
                                    index_t before) const = 0;

  virtual void observe(const policy& p, const device_call& call,
                       const query_layout& queries) const = 0;
  virtual void compress(const policy& p, const device_call& call, const query_layout& queries,
                        const device_budgets& budgets) const = 0;
  /// `q`, `out` `[heads, group, dim]`, `k`, `v` `[heads, dim]`, of the cache's scalar.
  virtual void step(const policy& p, const device_call& call, const void* q, const void* k,
                    const void* v, const device_budgets& budgets, void* out) const = 0;
  virtual void attend(const policy& p, const device_call& call, const void* q, void* out,
                      float* log_sum_exp) const = 0;
  /// How many queries `lookahead` makes of so many.
  virtual index_t lookahead_count(index_t queries,
                                  const kvmeld::lookahead_options& options) const = 0;
  /// `out [heads, group, n, dim]`, `position [heads, n]`.
  virtual void lookahead(const device_call& call, const query_layout& queries,
                         const kvmeld::lookahead_options& options, void* out,
                         index_t* position) const = 0;

 protected:
  ~device_calls() = default;
};

const device_calls& float_calls();
const device_calls& half_calls();
const device_calls& bfloat16_calls();

}  // namespace kvmeld_torch
