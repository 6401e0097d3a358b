// SPDX-License-Identifier: MIT
// The operators on a GPU (schema.cpp says what they are): kernels on PyTorch's stream, in memory of
// its allocator.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/where.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>  // std::ranges::copy
#include <cstddef>    // std::byte
#include <map>
#include <tuple>

#include "arguments.hpp"
#include "device_calls.hpp"
#include "operators.hpp"
#include "schema.hpp"
#include "tensors.hpp"

namespace kvmeld_torch {
namespace device {
namespace {

using at::Tensor;
using at::TensorList;
using kvmeld::storage;

const device_calls& calls_for(storage type) {
  return type == storage::f32   ? float_calls()
         : type == storage::f16 ? half_calls()
                                : bfloat16_calls();
}

/// Numbers that kernels read beside tensors. A decode step's are those of the step before, and
/// copied once, from pinned memory, which PyTorch keeps until the copy has ended: nothing waits.
/// Those that a captured graph reads are never let go: its replays hold their addresses alone. Of
/// the others the last 1024 stay, or fewer.
template <class T>
Tensor kept_on(at::Device device, void* stream, std::span<const T> x) {
  using key = std::tuple<at::DeviceIndex, void*, std::string>;
  struct numbers {
    Tensor copy;
    bool captured = false;
  };
  constexpr std::size_t most = 1024;
  // Never destroyed: at the program's end PyTorch's allocator may be gone before it.
  thread_local auto& kept = *new std::map<key, numbers>;
  thread_local std::size_t limit = most;
  const auto bytes = x.size_bytes();
  key wanted(device.index(), stream, std::string(reinterpret_cast<const char*>(x.data()), bytes));
  auto at = kept.find(wanted);
  if (at == kept.end()) {
    if (kept.size() == limit) {
      std::erase_if(kept, [](const auto& entry) { return !entry.second.captured; });
      limit = kept.size() + most;
    }
    const auto size = static_cast<std::int64_t>(bytes);
    Tensor copy = at::empty({size}, at::TensorOptions(device).dtype(at::kByte));
    const Tensor host =
        at::empty({size}, at::TensorOptions(at::kByte).pinned_memory(device.is_cuda()));
    std::ranges::copy(std::as_bytes(x), static_cast<std::byte*>(host.mutable_data_ptr()));
    copy.copy_(host, /*non_blocking=*/true);
    at = kept.emplace(std::move(wanted), numbers{std::move(copy)}).first;
  }
  at->second.captured = at->second.captured || is_capturing();
  return at->second.copy;
}

/// Of one call: its heads, its stream, its memory.
class device_work {
 public:
  device_work(TensorList cache, const model_shape& model, const maybe_heads& heads,
              const maybe_tensor& places = {})
      : device_(device_of(cache)), guard_(device_), stream_(current_stream(device_)) {
    kvmeld::expects(cache[0].dim() != 2,
                    "keys: expected [heads, capacity, dim] or pages on a GPU, got packed heads");
    call_.cache = tensors_of(cache, model, device_);
    call_.stream = stream_;
    if (const auto& sinks = call_.cache.spec->sink_logits; !sinks.empty()) {
      std::vector<float> all;  // those of a sequence, again for each
      while (all.size() < static_cast<std::size_t>(shape().heads * shape().group)) {
        all.insert(all.end(), sinks.begin(), sinks.end());
      }
      call_.sink_logits = read<float>(all);
    }
    const auto listed = heads_of(heads, shape().heads);
    count_ = listed ? static_cast<index_t>(listed->size()) : shape().heads;
    if (listed) {
      call_.active = read<index_t>(*listed);
      call_.active_count = count_;
    } else if (places) {
      call_.active = places_of(*places, device_);
      call_.active_count = count_ = static_cast<index_t>(places->numel());
    }
  }

  const device_call& call() const { return call_; }
  const device_calls& calls() const { return calls_for(type()); }
  const tensor_shape& shape() const { return call_.cache.shape; }
  storage type() const { return call_.cache.type.keys; }
  at::Device device() const { return device_; }
  /// Heads that the call is for.
  index_t count() const { return count_; }

  at::TensorOptions of(at::ScalarType dtype) const {
    return at::TensorOptions(device_).dtype(dtype);
  }
  at::ScalarType dtype() const {
    return type() == storage::f32 ? at::kFloat : type() == storage::f16 ? at::kHalf : at::kBFloat16;
  }
  /// `x` of these sizes in the cache's dtype.
  Tensor rows(const char* what, const Tensor& x, ints sizes) const {
    expect_rows(what, x, sizes, device_);
    return x.to(dtype());
  }
  query_tensors queries(const maybe_tensor& x, const maybe_tensor& positions,
                        std::int64_t before) const {
    return {shape(), x, positions, before, dtype(), device_};
  }
  void allocate(std::size_t bytes) {
    memory_ = at::empty({static_cast<std::int64_t>(bytes)}, of(at::kByte));
    call_.memory = {memory_.mutable_data_ptr(), bytes};
  }
  device_budgets budgets(std::span<const kvmeld::budget> host) const {
    const auto same = [&](const kvmeld::budget& x) {
      return x.slots == host[0].slots && x.trigger == host[0].trigger;
    };
    return {host, std::ranges::all_of(host, same) ? nullptr : read<kvmeld::budget>(host)};
  }

 private:
  static at::Device device_of(TensorList cache) {
    kvmeld::expects(cache.size() == parts, "cache: expected ", parts,
                    " tensors on a GPU (rows in few bits are held on the CPU), got ", cache.size());
    return cache[0].device();
  }

  /// Numbers on the device, which stay there while the call lives.
  template <class T>
  const T* read(std::span<const T> x) const {
    return reinterpret_cast<const T*>(
        read_.emplace_back(kept_on(device_, stream_, x)).const_data_ptr());
  }

  at::Device device_;
  c10::DeviceGuard guard_;
  void* stream_;
  device_call call_;
  index_t count_ = 0;
  Tensor memory_;
  mutable std::vector<Tensor> read_;
};

/// What compress takes of a prompt's own queries: where the policy plans ahead, some moved there.
/// What it wants of all is measured first. Both are empty for any other policy.
std::tuple<Tensor, Tensor> moved_ahead(device_work& work, const kvmeld::any_policy_or_peer& p,
                                       const query_layout& own) {
  const auto& s = work.shape();
  const auto use = kvmeld::declared(p).prompt_use();
  const kvmeld::lookahead_options options{use.count, use.positions};
  const bool ahead = use.plans == kvmeld::prompt_use::planned::lookahead && own.count > 0;
  const index_t n = ahead ? work.calls().lookahead_count(own.count, options) : 0;
  Tensor rows = at::empty({s.heads, s.group, n, s.dim}, work.of(work.dtype())),
         position = at::empty({s.heads, n}, work.of(at::kInt));
  if (use.observes && own.count > 0) {
    work.allocate(work.calls().observe_bytes(p, work.call(), own.count, own.before));
    work.calls().observe(p, work.call(), own);
  }
  if (ahead) {
    work.calls().lookahead(work.call(), own, options, rows.mutable_data_ptr(),
                           position.mutable_data_ptr<index_t>());
  }
  return {rows, position.slice(0, 0, 1).flatten()};  // heads have seen as many tokens
}

std::tuple<Tensor, Tensor> observe(const text& policy, TensorList cache, const Tensor& queries,
                                   std::int64_t before, std::int64_t group, double scale,
                                   const maybe_tensor& terms) {
  return guarded([&] {
    device_work work(cache, {group, scale, terms}, {});
    const auto& p = policy_of(policy);
    kvmeld::expects(kvmeld::errc::unsupported,
                    kvmeld::declared(p).prompt_use().plans != kvmeld::prompt_use::planned::latest,
                    "observe: expected a policy that need not see a prompt again on a GPU, got ",
                    p.name());
    return moved_ahead(work, p, work.queries(queries, {}, before).rows());
  });
}

void compress(const text& policy, TensorList cache, const maybe_tensor& queries, ints budget,
              ints trigger, const maybe_tensor& positions, std::int64_t group, double scale,
              const maybe_tensor& terms) {
  guarded([&] {
    device_work work(cache, {group, scale, terms}, {});
    const auto& p = policy_of(policy);
    query_tensors given = work.queries(queries, positions, 0);
    std::tuple<Tensor, Tensor> ahead;
    if (!positions &&
        kvmeld::declared(p).prompt_use().plans == kvmeld::prompt_use::planned::lookahead) {
      ahead = moved_ahead(work, p, given.rows());
      given = work.queries(std::get<0>(ahead), std::get<1>(ahead), 0);
    }
    const auto budgets = budgets_of(work.shape().heads, span_of(budget), span_of(trigger));
    index_t most = 0;
    for (const kvmeld::budget& x : budgets) {
      most = std::max(most, x.slots);
    }
    const query_layout& rows = given.rows();
    work.allocate(work.calls().workspace_bytes(p, work.call(), rows.count, most, rows.before));
    work.calls().compress(p, work.call(), rows, work.budgets(budgets));
  });
}

Tensor step(const text& policy, TensorList cache, const Tensor& q, const Tensor& k, const Tensor& v,
            ints budget, ints trigger, maybe_heads heads, std::int64_t group, double scale,
            const maybe_tensor& terms, const maybe_tensor& places) {
  return guarded([&] {
    kvmeld::expects(!heads || !places, "step: expected heads or places, got both");
    const auto& p = policy_of(policy);
    device_work work(cache, {group, scale, terms}, heads, places);
    const auto& s = work.shape();
    const std::int64_t count = work.count();
    const Tensor query = work.rows("q", q, {count, s.group, s.dim}),
                 key = work.rows("k", k, {count, s.dim}),
                 value = work.rows("v", v, {count, s.value_dim});
    const auto budgets = budgets_of(s.heads, span_of(budget), span_of(trigger));
    Tensor out = at::empty({count, s.group, s.value_dim}, work.of(work.dtype()));
    work.allocate(work.calls().workspace_bytes(p, work.call(), 0, 1, 0));
    work.calls().step(p, work.call(), query.const_data_ptr(), key.const_data_ptr(),
                      value.const_data_ptr(), work.budgets(budgets), out.mutable_data_ptr());
    return out;
  });
}

/// Keys `[heads, capacity, dim]`: in pages, copied behind one another.
Tensor keys_of(const Tensor& keys, const Tensor& table) {
  if (keys.dim() == 3) {
    return keys;
  }
  const auto pages = table.flatten().clamp(0, keys.size(0) - 1);  // -1: none, behind a length
  return keys.index_select(0, pages)
      .unflatten(0, table.sizes())
      .permute({0, 3, 1, 2, 4})  // sequences, heads of each, pages, slots, dim
      .reshape({-1, table.size(1) * keys.size(1), keys.size(3)});
}

/// exp(logit − log-sum-exp) `[heads, group, capacity]`, 0 behind a head's length.
Tensor probabilities_of(TensorList cache, const device_work& work, const Tensor& q,
                        const Tensor& log_sum_exp) {
  const auto at = [&](part p) -> const Tensor& { return cache[static_cast<std::size_t>(p)]; };
  const Tensor keys = keys_of(at(part::keys), at(part::measured));
  const Tensor products = at::matmul(q.to(at::kFloat), keys.to(at::kFloat).transpose(1, 2));
  const auto& spec = *work.call().cache.spec;
  Tensor logits = products * double{spec.scale};
  if (const double cap = spec.soft_cap; cap > 0) {
    logits = (logits / cap).tanh() * cap;
  }
  logits = logits + at(part::log_mass).unsqueeze(1);
  const Tensor held =
      at::arange(work.shape().capacity, work.of(at::kInt)) < at(part::length).unsqueeze(1);
  return at::where(held.unsqueeze(1), (logits - log_sum_exp.unsqueeze(2)).exp(), 0.0);
}

std::tuple<Tensor, Tensor, Tensor> attend(const text& policy, TensorList cache, const Tensor& q,
                                          bool probabilities, std::int64_t group, double scale,
                                          const maybe_tensor& terms) {
  return guarded([&] {
    const auto& p = policy_of(policy);
    device_work work(cache, {group, scale, terms}, {});
    const auto& s = work.shape();
    const Tensor query = work.rows("q", q, {s.heads, s.group, s.dim});
    Tensor out = at::empty({s.heads, s.group, s.value_dim}, work.of(work.dtype()));
    Tensor log_sum_exp = at::empty({s.heads, s.group}, work.of(at::kFloat));
    work.allocate(work.calls().workspace_bytes(p, work.call(), 0, 1, 0));
    work.calls().attend(p, work.call(), query.const_data_ptr(), out.mutable_data_ptr(),
                        log_sum_exp.mutable_data_ptr<float>());
    Tensor mass = probabilities ? probabilities_of(cache, work, query, log_sum_exp)
                                : at::empty({s.heads, s.group, 0}, work.of(at::kFloat));
    return std::tuple(out, log_sum_exp, mass);
  });
}

void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(false, op.operator_name().name,
              ": expected tensors on the CPU, got some on a GPU, where step observes by itself");
}

}  // namespace
}  // namespace device

void implement_on_device(torch::Library& m) {
  m.impl("compress", device::compress);
  m.impl("observe", device::observe);
  m.impl("step", device::step);
  m.impl("attend", device::attend);
  for (const char* name : {"shared_scores", "divide", "observe_step"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&device::refuse>());
  }
}

}  // namespace kvmeld_torch
