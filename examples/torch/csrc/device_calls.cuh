// SPDX-License-Identifier: MIT
/// `device_calls` by the kernels, for caches of one scalar.
#pragma once

#include <string>
#include <type_traits>  // std::is_pointer_v

#include "device_calls.hpp"
#include "kvmeld/cuda/attend.cuh"
#include "kvmeld/cuda/compress.cuh"
#include "kvmeld/cuda/observe.cuh"
#include "kvmeld/cuda/policies/d2o.cuh"
#include "kvmeld/cuda/policies/ems.cuh"
#include "kvmeld/cuda/policies/fold.cuh"
#include "kvmeld/cuda/policies/full_cache.cuh"
#include "kvmeld/cuda/policies/h2o.cuh"
#include "kvmeld/cuda/policies/keepkv.cuh"
#include "kvmeld/cuda/policies/kvmerger.cuh"
#include "kvmeld/cuda/policies/snapkv.cuh"
#include "kvmeld/cuda/policies/streaming_llm.cuh"
#include "kvmeld/cuda/policies/tova.cuh"
#include "kvmeld/cuda/policies/zsmerge.cuh"
#include "kvmeld/cuda/score/lookahead.cuh"
#include "kvmeld/cuda/step.cuh"

namespace kvmeld_torch {

namespace gpu = kvmeld::cuda;

template <class Scalar>
class device_kernels final : public device_calls {
 public:
  std::size_t workspace_bytes(const policy& any, const device_call& call, index_t queries,
                              index_t target, index_t before) const override {
    std::size_t bytes = 0;
    visit(any, [&](const auto& p) {
      bytes = gpu::workspace_bytes(p, view(call), queries, target, before);
    });
    return bytes;
  }
  std::size_t observe_bytes(const policy& any, const device_call& call, index_t queries,
                            index_t before) const override {
    std::size_t bytes = 0;
    visit(any, [&](const auto& p) {
      bytes = gpu::observe_workspace_bytes(p, view(call), queries, before);
    });
    return bytes;
  }
  void observe(const policy& any, const device_call& call,
               const query_layout& queries) const override {
    visit(any, [&](const auto& p) {
      gpu::observe(p, view(call), state(p, call), rows(queries), call.memory, stream(call));
    });
  }
  void compress(const policy& any, const device_call& call, const query_layout& queries,
                const device_budgets& budgets) const override {
    visit(any, [&](const auto& p) {
      gpu::compress(p, view(call), state(p, call), rows(queries), limits(budgets), call.memory,
                    stream(call));
    });
  }
  void step(const policy& any, const device_call& call, const void* q, const void* k, const void* v,
            const device_budgets& budgets, void* out) const override {
    visit(any, [&](const auto& p) {
      gpu::step(
          p, view(call), state(p, call), static_cast<const Scalar*>(q),
          gpu::new_tokens<Scalar>{static_cast<const Scalar*>(k), static_cast<const Scalar*>(v)},
          limits(budgets), static_cast<Scalar*>(out), call.memory, stream(call));
    });
  }
  void attend(const policy& any, const device_call& call, const void* q, void* out,
              float* log_sum_exp) const override {
    visit(any, [&](const auto& p) {
      const auto rule = gpu::detail::rule_of(p, view(call));
      kvmeld::expects(kvmeld::errc::unsupported,
                      !gpu::shares_entries<std::remove_cvref_t<decltype(rule)>>,
                      "attend: expected a policy that attends by itself on a GPU, got ", p.name(),
                      " (kvmeld::step alone)");
      gpu::attend(view(call), static_cast<const Scalar*>(q), static_cast<Scalar*>(out), log_sum_exp,
                  call.memory, stream(call));
    });
  }
  index_t lookahead_count(index_t queries,
                          const kvmeld::lookahead_options& options) const override {
    return gpu::lookahead_count(queries, options);
  }
  void lookahead(const device_call& call, const query_layout& queries,
                 const kvmeld::lookahead_options& options, void* out,
                 index_t* position) const override {
    gpu::lookahead(view(call), rows(queries), options, static_cast<Scalar*>(out), position,
                   stream(call));
  }

 private:
  /// nvcc's streams are pointers; the emulator has one order of threads.
  static gpu::stream stream(const device_call& call) {
    if constexpr (std::is_pointer_v<gpu::stream>) {
      return static_cast<gpu::stream>(call.stream);
    } else {
      return {};
    }
  }

  static gpu::plane<Scalar> plane(const char* what, const tensor_rows& at, index_t dim,
                                  const page_tensors& pages) {
    constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(Scalar));
    kvmeld::expects(at.element == size || dim == 1, what,
                    ": expected rows [dim] with an element stride of 1 on a GPU, got ",
                    at.element / size);
    gpu::plane<Scalar> x{reinterpret_cast<Scalar*>(at.data), at.head / size, at.row / size};
    if (pages.table != nullptr) {
      x.heads = pages.heads, x.table = pages.table, x.pages = pages.pages;
      x.slots = pages.slots, x.page = at.page / size;
    }
    return x;
  }

  static gpu::cache_view<Scalar> view(const device_call& call) {
    const cache_tensors& at = call.cache;
    gpu::cache_view<Scalar> x{plane("keys", at.keys, at.shape.dim, at.paged),
                              plane("values", at.values, at.shape.dim, at.paged),
                              at.log_mass,
                              at.position,
                              at.length,
                              at.seen,
                              at.shape.heads,
                              at.shape.capacity,
                              at.shape.dim,
                              at.shape.group,
                              at.spec->scale,
                              at.spec.get()};
    x.soft_cap = {at.spec->soft_cap, at.spec->scale}, x.sink_logits = call.sink_logits;
    return call.active == nullptr ? x : x.with_active(call.active, call.active_count);
  }

  template <class Policy>
  static gpu::state_view state(const Policy& p, const device_call& call) {
    const cache_tensors& at = call.cache;
    gpu::state_view x;
    for (const auto& column : gpu::detail::columns_of(p)) {
      x.merges[x.count] = column.reduce, x.initial[x.count] = column.initial, ++x.count;
    }
    kvmeld::expects(x.count == at.column_count, Policy::name(), ": expected columns [heads, ",
                    x.count, ", capacity], got ", at.column_count, " columns per head");
    const std::size_t floats = gpu::detail::memory_of(p, view(call));
    kvmeld::expects(floats <= static_cast<std::size_t>(at.memory_row), Policy::name(),
                    ": expected memory of at least ", floats, " floats per head, got ",
                    at.memory_row);
    x.columns = at.columns, x.column_stride = at.shape.capacity;
    x.head_stride = std::ptrdiff_t{at.column_count} * at.shape.capacity;
    if (x.head_stride == 0) {
      x.head_stride = at.shape.capacity;
    }
    x.memory = at.memory, x.floats = static_cast<index_t>(floats);
    x.memory_stride = at.memory_row;
    return x;
  }

  static gpu::query_rows<Scalar> rows(const query_layout& q) {
    return {
        static_cast<const Scalar*>(q.data), q.count, q.head, q.group, q.row, q.position, q.before};
  }

  /// What is the same for all heads needs nothing on the device.
  static gpu::head_budgets limits(const device_budgets& b) {
    return b.device == nullptr ? gpu::head_budgets(b.host[0]) : gpu::head_budgets(b.host, b.device);
  }

  /// `f(policy)` of the policy that it is.
  template <class F>
  static void visit(const policy& any, F f) {
    any.visit([&](const auto& p) {
      using policy_type = std::remove_cvref_t<decltype(p)>;
      if constexpr (gpu::on_device<policy_type>) {
        f(p);
      } else {
        kvmeld::expects(
            kvmeld::errc::unsupported, false, p.name(),
            ": expected a policy with kernels on a GPU (docs/how-to/cuda.md lists them)");
      }
    });
  }
};

}  // namespace kvmeld_torch
