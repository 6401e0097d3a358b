// SPDX-License-Identifier: MIT
#include "operators.hpp"

#include <algorithm>  // std::fill_n
#include <limits>     // std::numeric_limits

#include "kvmeld/compress/held_queries.hpp"
#include "kvmeld/compress/shared_slots.hpp"
#include "kvmeld/memory/convert.hpp"

namespace kvmeld_torch {

using any_policy = kvmeld::any_policy_or_peer;
using kvmeld::budget;
using kvmeld::expects;
using kvmeld::held_queries;

namespace {

/// Measures one head on its prompt's own queries; what its policy plans on lies in `held`.
query_rows measure(const any_policy& policy, const kvmeld::head_ref& head,
                   kvmeld::head_state& state, const query_rows& own, held_queries& held) {
  observe_prompt(policy, head, state, held, own);
  return planned_queries(policy, head, state, held);
}

/// Refused: more queries than tokens, heads that have seen different numbers of them.
void expect_own(const char* call, const tensor_cache& cache, const query_rows& own) {
  const index_t seen = cache.head(0).next_position();
  expects(own.count <= seen, call, ": expected at most ", seen,
          " queries (the tokens appended), got ", own.count);
  for (index_t h = 1; h < cache.heads() && own.count > 0; ++h) {
    const index_t of_head = cache.head(h).next_position();
    expects(of_head == seen, call, ": expected heads that have seen ", seen,
            " tokens as the first has, got ", of_head, " of head ", h);
  }
}

}  // namespace

kept_queries observe(const any_policy& policy, tensor_cache cache, const query_rows& own,
                     const threads& run) {
  tensor_states states(policy, cache, run.workers());
  expect_own("observe", cache, own);
  const auto heads = static_cast<std::size_t>(cache.heads());
  std::vector<held_queries> held(heads);
  std::vector<query_rows> of_heads(heads);
  run(cache.heads(), [&](index_t h, index_t) {
    const auto i = static_cast<std::size_t>(h);
    if (own.count > 0) {
      of_heads[i] = measure(policy, cache.head(h), states[h], own.of(h), held[i]);
    }
  });
  const auto& shape = cache.tensors().shape;
  kept_queries kept{.count = of_heads[0].count};
  for (const query_rows& of_head : of_heads) {
    for (index_t i = 0; i < shape.group * kept.count; ++i) {
      const float* const q = of_head.at(i / kept.count, i % kept.count);
      kept.rows.insert(kept.rows.end(), q, q + shape.dim);
    }
  }
  for (index_t i = 0; i < kept.count; ++i) {
    kept.position.push_back(of_heads[0].position_of(i, cache.head(0).next_position()));
  }
  return kept;
}

void compress(const any_policy& policy, tensor_cache cache, const query_rows& queries,
              std::span<const budget> budgets, const threads& run) {
  tensor_states states(policy, cache, run.workers());
  const bool own = queries.count > 0 && queries.position == nullptr;
  if (own) {
    expect_own("compress", cache, queries);
  }
  for (index_t h = 0; h < cache.heads(); ++h) {
    check_compress(policy, cache.head(h), states[h], budgets[static_cast<std::size_t>(h)],
                   queries.count > 0);
    expects(own || queries.count == 0 || states[h].observed() > 0,
            "compress: expected the prompt's own queries or those that observe kept, got others");
  }
  run(cache.heads(), [&](index_t h, index_t worker) {
    if (cache.head(h).length() > 0) {
      held_queries held;
      const query_rows given = queries.of(h);
      kvmeld::compress(policy, cache.head(h), states[h], states.work(worker),
                       budgets[static_cast<std::size_t>(h)],
                       own ? measure(policy, cache.head(h), states[h], given, held) : given);
    }
  });
}

void shared_scores(const any_policy& policy, tensor_cache cache, float* scores) {
  constexpr float all = std::numeric_limits<float>::infinity();
  tensor_states states(policy, cache, 1);
  const auto shared = kvmeld::shared_slots::of(policy);
  const auto capacity = static_cast<std::size_t>(cache.tensors().shape.capacity);
  for (index_t h = 0; h < cache.heads(); ++h) {
    const auto head = cache.head(h);
    const std::span own(scores + static_cast<std::size_t>(h) * capacity, capacity);
    std::ranges::fill(own, -all);
    states[h].extend(head.length());  // tokens without queries have no score
    kvmeld::declared(policy).shared_scores(head, states[h], own);
    const index_t end = head.next_position() - shared.latest;
    for (index_t s = 0; s < head.length(); ++s) {
      if (const index_t at = head.position(s); at < shared.sinks || at >= end) {
        own[static_cast<std::size_t>(s)] = all;
      }
    }
  }
}

void convert(tensor_cache from, tensor_cache to, const threads& run) {
  const tensor_shape &a = from.tensors().shape, &b = to.tensors().shape;
  expects(a.heads == b.heads && a.dim == b.dim && a.value_dim == b.value_dim, "convert: expected ",
          a.heads, " heads of ", a.dim, " and ", a.value_dim, " numbers, got ", b.heads, " of ",
          b.dim, " and ", b.value_dim);
  for (index_t h = 0; h < from.heads(); ++h) {
    expects(kvmeld::errc::no_capacity, from.head(h).length() <= to.head(h).capacity(),
            "convert: expected a capacity of at least ", from.head(h).length(), " slots, got ",
            to.head(h).capacity(), " of head ", h);
  }
  run(from.heads(),
      [&](index_t h, index_t) { kvmeld::detail::copy_slots(from.head(h), to.head(h)); });
}

void observe_step(const any_policy& policy, tensor_cache cache, const float* probabilities,
                  const float* log_sum_exp, const float* query) {
  tensor_states states(policy, cache, 1);
  const auto& shape = cache.tensors().shape;
  const auto group = static_cast<std::size_t>(shape.group);
  for (index_t h = 0; h < cache.heads(); ++h) {
    const auto head = cache.head(h);
    const auto length = static_cast<std::size_t>(head.length());
    const std::ptrdiff_t first = std::ptrdiff_t{h} * shape.group;
    const auto packed = std::span(states.work().attention).first(group * length);
    for (std::size_t g = 0; g < group; ++g) {
      const auto row = first + static_cast<std::ptrdiff_t>(g);
      std::copy_n(probabilities + row * shape.capacity, length, packed.data() + g * length);
    }
    kvmeld::observation seen{.probabilities = packed};
    if (log_sum_exp != nullptr) {
      seen.log_sum_exp = std::span(log_sum_exp + first, group);
    }
    if (query != nullptr) {
      seen.query = query + first * shape.dim;
    }
    kvmeld::observe(policy, head, states[h], states.work(), seen);
  }
}

void step(const any_policy& policy, tensor_cache cache, const kvmeld::step_input& in,
          std::span<const budget> budgets, const kvmeld::head_selection& heads,
          std::span<float> out, const threads& run) {
  tensor_states states(policy, cache, run.workers());
  const auto budget_of = [&](index_t h) { return budgets[static_cast<std::size_t>(h)]; };
  heads.check("step", cache.heads());
  for (index_t i = 0; i < heads.count(); ++i) {
    check_step(policy, cache.head(heads[i]), budget_of(heads[i]));
  }
  const tensor_shape& shape = cache.tensors().shape;
  const index_t dim = shape.dim, value_dim = shape.value_dim, rows = shape.group * dim;
  std::vector<char> marks(static_cast<std::size_t>(heads.count()));
  run(heads.count(), [&](index_t i, index_t worker) {
    const index_t h = heads[i];
    kvmeld::workspace& work = states.work(worker);
    float* const buffer = work.input.data();
    const float* const q = in.q.floats(std::ptrdiff_t{i} * rows, rows, buffer);
    const float* const k = in.k.floats(std::ptrdiff_t{i} * dim, dim, buffer + rows);
    const float* const v =
        in.v.floats(std::ptrdiff_t{i} * value_dim, value_dim, buffer + rows + dim);
    marks[static_cast<std::size_t>(i)] =
        !kvmeld::try_step(policy, cache.head(h), states[h], work, q, k, v, budget_of(h),
                          out.data() + std::ptrdiff_t{i} * shape.group * value_dim);
  });
  const auto marked = std::ranges::find(marks, 1) - marks.begin();
  expects(kvmeld::errc::not_finite, marked == std::ssize(marks),
          "step: expected finite rows, got NaN or Inf in head ",
          marked == std::ssize(marks) ? 0 : heads[static_cast<index_t>(marked)],
          " (as it was; all other heads have made their step)");
}

void attend(const any_policy& policy, tensor_cache cache, const float* query, float* out,
            float* log_sum_exp, float* probabilities, const threads& run) {
  tensor_states states(policy, cache, run.workers());
  const auto& shape = cache.tensors().shape;
  for (index_t h = 0; h < cache.heads(); ++h) {
    expects(cache.head(h).length() > 0, "attend: expected at least 1 slot, got 0 in head ", h);
  }
  run(cache.heads(), [&](index_t h, index_t worker) {
    const auto head = cache.head(h);
    const auto group = static_cast<std::size_t>(shape.group),
               length = static_cast<std::size_t>(head.length());
    const std::ptrdiff_t row = std::ptrdiff_t{h} * shape.group;
    auto packed = std::span(states.work(worker).attention)
                      .first(probabilities != nullptr ? group * length : 0);
    kvmeld::declared(policy).attend(head, states[h], query + row * shape.dim,
                                    out + row * shape.value_dim, packed,
                                    std::span(log_sum_exp + row, group));
    for (std::size_t g = 0; g < group && probabilities != nullptr; ++g) {
      float* const to = probabilities + (row + static_cast<std::ptrdiff_t>(g)) * shape.capacity;
      std::ranges::copy(packed.subspan(g * length, length), to);
      std::fill_n(to + length, shape.capacity - head.length(), 0.0F);
    }
  });
}

}  // namespace kvmeld_torch
