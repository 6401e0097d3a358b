// SPDX-License-Identifier: MIT
// The operators on the CPU (schema.cpp says what they are).
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>

#include "arguments.hpp"
#include "schema.hpp"
#include "tensors.hpp"

namespace kvmeld_torch {
namespace cpu {
namespace {

using at::Tensor;
using at::TensorList;
using maybe = maybe_tensor;

/// PyTorch's threads, as an executor.
threads torch_threads() {
  const auto count = static_cast<index_t>(at::in_parallel_region() ? 1 : at::get_num_threads());
  return {count, [count](index_t n, const threads::task& f) {
            std::atomic<index_t> next = 0;
            at::parallel_for(0, std::min(n, count), 1, [&](std::int64_t first, std::int64_t last) {
              for (std::int64_t worker = first; worker < last; ++worker) {
                for (index_t i; (i = next++) < n;) {
                  f(i, static_cast<index_t>(worker));
                }
              }
            });
          }};
}

/// Policies measure in float: 16-bit queries become floats here.
query_tensors in_floats(const tensor_cache& cache, const maybe& queries, const maybe& positions,
                        std::int64_t before) {
  return {cache.tensors().shape, queries, positions, before, at::kFloat, at::kCPU};
}

std::tuple<Tensor, Tensor> observe(const text& policy, TensorList cache, const Tensor& queries,
                                   std::int64_t before, std::int64_t group, double scale,
                                   const maybe& terms) {
  return guarded([&] {
    const auto& p = policy_of(policy);
    const tensor_cache kv = cache_of(cache, {group, scale, terms});
    const auto& s = kv.tensors().shape;
    const query_tensors own = in_floats(kv, queries, {}, before);
    const kept_queries kept = kvmeld_torch::observe(p, kv, own.rows().floats(), torch_threads());
    Tensor rows = at::empty({s.heads, s.group, kept.count, s.dim}, at::kFloat),
           position = at::empty({kept.count}, at::kInt);
    std::ranges::copy(kept.rows, rows.mutable_data_ptr<float>());
    std::ranges::copy(kept.position, position.mutable_data_ptr<int>());
    return std::tuple(rows, position);
  });
}

void compress(const text& policy, TensorList cache, const maybe& queries, ints budget, ints trigger,
              const maybe& positions, std::int64_t group, double scale, const maybe& terms) {
  guarded([&] {
    const auto& p = policy_of(policy);
    const tensor_cache kv = cache_of(cache, {group, scale, terms});
    const query_tensors given = in_floats(kv, queries, positions, 0);
    kvmeld_torch::compress(p, kv, given.rows().floats(),
                           budgets_of(kv.heads(), span_of(budget), span_of(trigger)),
                           torch_threads());
  });
}

Tensor shared_scores(const text& policy, TensorList cache, std::int64_t group, double scale,
                     const maybe& terms) {
  return guarded([&] {
    const auto& p = policy_of(policy);
    const tensor_cache kv = cache_of(cache, {group, scale, terms});
    const auto& s = kv.tensors().shape;
    Tensor scores = at::empty({s.heads, s.capacity}, at::kFloat);
    kvmeld_torch::shared_scores(p, kv, scores.mutable_data_ptr<float>());
    return scores;
  });
}

void convert(TensorList to, TensorList cache, std::int64_t group, double scale,
             const maybe& terms) {
  guarded([&] {
    const model_shape model{group, scale, terms};
    kvmeld_torch::convert(cache_of(cache, model), cache_of(to, model), torch_threads());
  });
}

std::vector<std::int64_t> divide(const text& policy, const Tensor& scores, std::int64_t slots) {
  return guarded([&] {
    kvmeld::expects(scores.dim() == 2 && scores.size(0) > 0,
                    "divide: expected scores [heads, slots], got ", scores.dim(), " dimensions");
    const float* const all = floats_of("scores", scores, scores.sizes());
    return kvmeld_torch::divide(policy_of(policy), {all, static_cast<std::size_t>(scores.numel())},
                                positive("heads", scores.size(0)), positive("slots", slots));
  });
}

void observe_step(const text& policy, TensorList cache, const Tensor& probabilities,
                  const maybe& log_sum_exp, const maybe& query, std::int64_t group, double scale,
                  const maybe& terms) {
  guarded([&] {
    const auto& p = policy_of(policy);
    const tensor_cache kv = cache_of(cache, {group, scale, terms});
    const auto& s = kv.tensors().shape;
    const auto given = [&](const char* what, const maybe& x, ints sizes) {
      return x ? floats_of(what, *x, sizes) : nullptr;
    };
    kvmeld_torch::observe_step(
        p, kv, floats_of("probabilities", probabilities, {s.heads, s.group, s.capacity}),
        given("log_sum_exp", log_sum_exp, {s.heads, s.group}),
        given("query", query, {s.heads, s.group, s.dim}));
  });
}

Tensor step(const text& policy, TensorList cache, const Tensor& q, const Tensor& k, const Tensor& v,
            ints budget, ints trigger, maybe_heads heads, std::int64_t group, double scale,
            const maybe& terms, const maybe& places) {
  return guarded([&] {
    kvmeld::expects(!places, "step: expected heads on the CPU, got places");
    const auto& p = policy_of(policy);
    const tensor_cache kv = cache_of(cache, {group, scale, terms});
    const auto& s = kv.tensors().shape;
    const auto listed = heads_of(heads, kv.heads());
    const kvmeld::head_selection chosen =
        listed ? kvmeld::head_selection(*listed) : kvmeld::head_range{0, kv.heads()};
    const std::int64_t count = chosen.count();
    expect_rows("q", q, {count, s.group, s.dim}, at::kCPU);
    expect_rows("k", k, {count, s.dim}, at::kCPU);
    expect_rows("v", v, {count, s.value_dim}, at::kCPU);
    const auto budgets = budgets_of(kv.heads(), span_of(budget), span_of(trigger));
    Tensor out = at::empty({count, s.group, s.value_dim}, at::kFloat);
    kvmeld_torch::step(
        p, kv, {numbers_of(q), numbers_of(k), numbers_of(v)}, budgets, chosen,
        std::span(out.mutable_data_ptr<float>(), static_cast<std::size_t>(out.numel())),
        torch_threads());
    return out;
  });
}

std::tuple<Tensor, Tensor, Tensor> attend(const text& policy, TensorList cache, const Tensor& q,
                                          bool probabilities, std::int64_t group, double scale,
                                          const maybe& terms) {
  return guarded([&] {
    const auto& p = policy_of(policy);
    const tensor_cache kv = cache_of(cache, {group, scale, terms});
    const auto& s = kv.tensors().shape;
    const float* const query = floats_of("q", q, {s.heads, s.group, s.dim});
    Tensor out = at::empty({s.heads, s.group, s.value_dim}, at::kFloat);
    Tensor log_sum_exp = at::empty({s.heads, s.group}, at::kFloat);
    Tensor mass = at::empty({s.heads, s.group, probabilities ? s.capacity : 0}, at::kFloat);
    kvmeld_torch::attend(p, kv, query, out.mutable_data_ptr<float>(),
                         log_sum_exp.mutable_data_ptr<float>(),
                         probabilities ? mass.mutable_data_ptr<float>() : nullptr, torch_threads());
    return std::tuple(out, log_sum_exp, mass);
  });
}

}  // namespace
}  // namespace cpu

TORCH_LIBRARY(kvmeld, m) { declare(m); }

TORCH_LIBRARY_IMPL(kvmeld, CPU, m) {
  m.impl("compress", cpu::compress);
  m.impl("shared_scores", cpu::shared_scores);
  m.impl("divide", cpu::divide);
  m.impl("convert", cpu::convert);
  m.impl("observe", cpu::observe);
  m.impl("observe_step", cpu::observe_step);
  m.impl("step", cpu::step);
  m.impl("attend", cpu::attend);
}

}  // namespace kvmeld_torch
