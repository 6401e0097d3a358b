// SPDX-License-Identifier: MIT
#include "operators.hpp"

#include <algorithm>  // std::fill_n

namespace kvmeld_torch {

using kvmeld::any_policy;
using kvmeld::budget;
using kvmeld::expects;

void compress(const any_policy& policy, tensor_cache cache, const query_rows& reference,
              std::span<const budget> budgets, const kvmeld::head_selection& heads,
              const threads& run) {
  tensor_states states(policy, cache, run.workers());
  kvmeld::compress(policy, cache, states.all(), heads, reference, budgets, run);
}

void observe(const any_policy& policy, tensor_cache cache, const query_rows& reference,
             const kvmeld::head_selection& heads, const threads& run) {
  tensor_states states(policy, cache, run.workers());
  kvmeld::observe(policy, cache, states.all(), heads, reference, run);
}

void observe_step(const any_policy& policy, tensor_cache cache, const float* probabilities,
                  const float* log_sum_exp, const float* query) {
  tensor_states states(policy, cache, 1);
  const auto& shape = cache.tensors().shape;
  const auto group = static_cast<std::size_t>(shape.group);
  std::vector<float> packed;
  for (index_t h = 0; h < cache.heads(); ++h) {
    const auto head = cache.head(h);
    const auto length = static_cast<std::size_t>(head.length());
    const float* const first = probabilities + std::ptrdiff_t{h} * shape.group * shape.capacity;
    packed.clear();
    for (index_t g = 0; g < shape.group; ++g) {
      const float* const row = first + std::ptrdiff_t{g} * shape.capacity;
      packed.insert(packed.end(), row, row + length);
    }
    kvmeld::observation seen{.probabilities = packed};
    if (log_sum_exp != nullptr) {
      seen.log_sum_exp = std::span(log_sum_exp + static_cast<std::size_t>(h) * group, group);
    }
    if (query != nullptr) {
      seen.query = query + std::ptrdiff_t{h} * shape.group * shape.dim;
    }
    kvmeld::observe(policy, head, states[h], states.all().workspace(), seen);
  }
}

void step(const any_policy& policy, tensor_cache cache, const kvmeld::step_input& in,
          std::span<const budget> budgets, const kvmeld::head_selection& heads,
          std::span<float> out, const threads& run) {
  tensor_states states(policy, cache, run.workers());
  kvmeld::step(policy, cache, states.all(), heads, in, budgets, out, run);
}

void attend(const any_policy& policy, tensor_cache cache, const float* query, float* out,
            float* log_sum_exp, float* probabilities, const threads& run) {
  tensor_states states(policy, cache, run.workers());
  const auto& shape = cache.tensors().shape;
  for (index_t h = 0; h < cache.heads(); ++h) {
    expects(cache.head(h).length() > 0, "attend: expected at least 1 slot, got 0 in head ", h);
    kvmeld::detail::expect_state(policy, cache.head(h), states[h]);
  }
  run(cache.heads(), [&](index_t h, index_t worker) {
    const auto head = cache.head(h);
    const auto group = static_cast<std::size_t>(shape.group),
               length = static_cast<std::size_t>(head.length());
    const std::ptrdiff_t row = std::ptrdiff_t{h} * shape.group;
    auto packed = std::span(states.all().workspace(worker).attention)
                      .first(probabilities != nullptr ? group * length : 0);
    kvmeld::traits::attend(policy, head, states[h], query + row * shape.dim, out + row * shape.dim,
                           packed, std::span(log_sum_exp + row, group), nullptr);
    for (std::size_t g = 0; g < group && probabilities != nullptr; ++g) {
      float* const to = probabilities + (row + static_cast<std::ptrdiff_t>(g)) * shape.capacity;
      std::ranges::copy(packed.subspan(g * length, length), to);
      std::fill_n(to + length, shape.capacity - head.length(), 0.0F);
    }
  });
}

void column_scores(tensor_cache cache, const query_rows& reference, index_t window, float decay,
                   kvmeld::group_combine combine, float* out, const threads& run) {
  const auto& shape = cache.tensors().shape;
  const std::ptrdiff_t all = std::ptrdiff_t{shape.heads} * shape.capacity;
  std::fill_n(out, 3 * all, 0.0F);
  run(cache.heads(), [&](index_t h, index_t) {
    const auto head = cache.head(h);
    const auto sums = [&](std::ptrdiff_t which) {
      return std::span(out + which * all + std::ptrdiff_t{h} * shape.capacity,
                       static_cast<std::size_t>(head.length()));
    };
    kvmeld::column_scores(head, reference.of(h),
                          {.window = window, .decay = decay, .combine = combine},
                          {.total = sums(0), .window = sums(1), .decayed = sums(2)});
  });
}

}  // namespace kvmeld_torch
