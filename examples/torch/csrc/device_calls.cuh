// SPDX-License-Identifier: MIT
/// `device_calls` by the kernels.
#pragma once

#include <string>
#include <type_traits>  // std::conditional_t

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

template <kvmeld::storage Type>
struct device_types {
  using scalar = std::conditional_t<
      Type == kvmeld::storage::f32, float,
      std::conditional_t<Type == kvmeld::storage::f16, gpu::half, gpu::bfloat16>>;

  /// nvcc's streams are pointers; the emulator has one order of threads.
  static gpu::stream stream(const device_call& call) {
    if constexpr (std::is_pointer_v<gpu::stream>) {
      return static_cast<gpu::stream>(call.stream);
    } else {
      return {};
    }
  }

  static gpu::plane<scalar> plane(const char* what, const tensor_rows& at, index_t dim) {
    constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(scalar));
    kvmeld::expects(at.element == size || dim == 1, what,
                    ": expected rows [dim] with an element stride of 1 on a GPU, got ",
                    at.element / size);
    return {reinterpret_cast<scalar*>(at.data), at.head / size, at.row / size};
  }

  static gpu::cache_view<scalar> view(const device_call& call) {
    const cache_tensors& at = call.cache;
    gpu::cache_view<scalar> x{plane("keys", at.keys, at.shape.dim),
                              plane("values", at.values, at.shape.dim),
                              at.log_mass,
                              at.position,
                              at.length,
                              at.seen,
                              at.shape.heads,
                              at.shape.capacity,
                              at.shape.dim,
                              at.shape.group,
                              at.shape.scale,
                              at.spec.get()};
    return call.active == nullptr ? x : x.with_active(call.active, call.active_count);
  }

  template <class Policy>
  static gpu::state_view state(const Policy& policy, const device_call& call) {
    const cache_tensors& at = call.cache;
    gpu::state_view x;
    for (const auto& column : gpu::detail::columns_of(policy)) {
      x.merges[x.count] = column.reduce, x.initial[x.count] = column.initial, ++x.count;
    }
    kvmeld::expects(x.count == at.column_count, Policy::name(), ": expected columns [heads, ",
                    x.count, ", capacity], got ", at.column_count, " columns per head");
    const std::size_t floats = gpu::detail::memory_of(policy, view(call));
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
    using rule = decltype(gpu::detail::rule_of(policy, view(call)));
    if constexpr (gpu::predicts_evicted<rule>) {
      if (at.memory_row - x.floats >= gpu::compared_rows) {  // behind the policy's own
        x.predicted = reinterpret_cast<index_t*>(at.memory + x.floats);
        x.predicted_stride = static_cast<index_t>(at.memory_row);
      }
    }
    return x;
  }

  static gpu::query_rows<scalar> queries(const query_layout& q) {
    return {
        static_cast<const scalar*>(q.data), q.count, q.head, q.group, q.row, q.position, q.before};
  }

  /// What is the same for all heads needs nothing on the device.
  static gpu::head_budgets budgets(const device_budgets& b) {
    return b.device == nullptr ? gpu::head_budgets(b.host[0]) : gpu::head_budgets(b.host, b.device);
  }

  /// `f(policy)` of the policy that it is.
  template <class F>
  static void visit(const kvmeld::any_policy& any, F f) {
    any.visit([&](const auto& policy) {
      using policy_type = std::remove_cvref_t<decltype(policy)>;
      if constexpr (gpu::on_device<policy_type>) {
        f(policy);
      } else {
        kvmeld::expects(
            kvmeld::errc::unsupported, false, policy.name(),
            ": expected a policy with kernels on a GPU (docs/how-to/cuda.md lists them)");
      }
    });
  }
};

template <kvmeld::storage Type>
std::size_t device_calls<Type>::workspace_bytes(const kvmeld::any_policy& any,
                                                const device_call& call, index_t queries,
                                                index_t target, index_t before) {
  using types = device_types<Type>;
  std::size_t bytes = 0;
  types::visit(any, [&](const auto& policy) {
    bytes = gpu::workspace_bytes(policy, types::view(call), queries, target, before);
  });
  return bytes;
}

template <kvmeld::storage Type>
std::size_t device_calls<Type>::observe_bytes(const kvmeld::any_policy& any,
                                              const device_call& call, index_t queries,
                                              index_t before) {
  using types = device_types<Type>;
  std::size_t bytes = 0;
  types::visit(any, [&](const auto& policy) {
    bytes = gpu::observe_workspace_bytes(policy, types::view(call), queries, before);
  });
  return bytes;
}

template <kvmeld::storage Type>
void device_calls<Type>::observe(const kvmeld::any_policy& any, const device_call& call,
                                 const query_layout& queries) {
  using types = device_types<Type>;
  types::visit(any, [&](const auto& policy) {
    gpu::observe(policy, types::view(call), types::state(policy, call), types::queries(queries),
                 call.memory, types::stream(call));
  });
}

template <kvmeld::storage Type>
void device_calls<Type>::compress(const kvmeld::any_policy& any, const device_call& call,
                                  const query_layout& queries, const device_budgets& budgets) {
  using types = device_types<Type>;
  types::visit(any, [&](const auto& policy) {
    gpu::compress(policy, types::view(call), types::state(policy, call), types::queries(queries),
                  types::budgets(budgets), call.memory, types::stream(call));
  });
}

template <kvmeld::storage Type>
void device_calls<Type>::step(const kvmeld::any_policy& any, const device_call& call, const void* q,
                              const void* k, const void* v, const device_budgets& budgets,
                              void* out) {
  using types = device_types<Type>;
  using scalar = typename types::scalar;
  types::visit(any, [&](const auto& policy) {
    gpu::step(policy, types::view(call), types::state(policy, call), static_cast<const scalar*>(q),
              gpu::new_tokens<scalar>{static_cast<const scalar*>(k), static_cast<const scalar*>(v)},
              types::budgets(budgets), static_cast<scalar*>(out), call.memory, types::stream(call));
  });
}

template <kvmeld::storage Type>
void device_calls<Type>::attend(const kvmeld::any_policy& any, const device_call& call,
                                const void* q, void* out, float* log_sum_exp) {
  using types = device_types<Type>;
  using scalar = typename types::scalar;
  types::visit(any, [&](const auto& policy) {
    const auto rule = gpu::detail::rule_of(policy, types::view(call));
    kvmeld::expects(kvmeld::errc::unsupported,
                    !gpu::shares_entries<std::remove_cvref_t<decltype(rule)>>,
                    "attend: expected a policy that attends by itself on a GPU, got ",
                    policy.name(), " (kvmeld::step alone)");
    gpu::attend(types::view(call), static_cast<const scalar*>(q), static_cast<scalar*>(out),
                log_sum_exp, call.memory, types::stream(call));
  });
}

template <kvmeld::storage Type>
void device_calls<Type>::lookahead(const device_call& call, const query_layout& queries,
                                   const kvmeld::lookahead_options& options, void* out,
                                   index_t* position) {
  using types = device_types<Type>;
  gpu::lookahead(types::view(call), types::queries(queries), options,
                 static_cast<typename types::scalar*>(out), position, types::stream(call));
}

}  // namespace kvmeld_torch
