// SPDX-License-Identifier: MIT
// Plans as tensors, and back.
#include <cmath>   // std::isnan
#include <limits>  // std::numeric_limits

#include "operators.hpp"

namespace kvmeld_torch {

using kvmeld::any_policy;
using kvmeld::expects;
using kvmeld::merge_plan;

namespace {

/// What is row `i` of `[rows, width]`.
template <class T>
T* row(T* all, index_t i, index_t width) {
  return all + std::ptrdiff_t{i} * width;
}

void write(const merge_plan& plan, index_t h, index_t capacity, const plan_output& out) {
  index_t* const begin = row(out.begin, h, capacity + 1);
  index_t* const source = row(out.source, h, capacity);
  float* const weight = row(out.weight, h, 2 * capacity);
  index_t at = 0;
  for (index_t r = 0; r < plan.rows(); ++r) {
    begin[r] = at;
    for (const kvmeld::merge_source& e : plan.row(r)) {
      source[at] = e.source;
      weight[2 * at] = e.key_weight, weight[2 * at + 1] = e.value_weight;
      ++at;
    }
    row(out.log_mass, h, capacity)[r] = plan.log_mass(r);
  }
  begin[plan.rows()] = at;
  out.rows[2 * h] = plan.rows(), out.rows[2 * h + 1] = plan.length();
  out.note[h] = plan.note().value_or(std::numeric_limits<float>::quiet_NaN());
}

/// Refused: rows and sources that lie outside of their tensors.
merge_plan read(const plan_input& from, index_t h, const tensor_shape& shape) {
  const index_t rows = from.rows[2 * h], length = from.rows[2 * h + 1], capacity = shape.capacity;
  expects(rows >= 0 && rows <= length && length <= capacity, "apply: expected 0 to ", capacity,
          " rows per head, got ", rows, " of ", length, " slots");
  const index_t* const begin = row(from.begin, h, capacity + 1);
  const index_t* const source = row(from.source, h, capacity);
  const float* const weight = row(from.weight, h, 2 * capacity);
  merge_plan plan;
  plan.reset(length);
  for (index_t r = 0; r < rows; ++r) {
    expects(begin[r] >= 0 && begin[r] <= begin[r + 1] && begin[r + 1] <= capacity,
            "apply: expected sources 0 to ", capacity, ", got ", begin[r], " to ", begin[r + 1],
            " of row ", r);
    for (index_t i = begin[r]; i < begin[r + 1]; ++i) {
      plan.add({source[i], weight[2 * i], weight[2 * i + 1]});
    }
    plan.end_row(row(from.log_mass, h, capacity)[r]);
  }
  if (from.most > 0) {
    expects(rows <= from.most, "apply: expected corrections of at least ", rows, " rows, got ",
            from.most);
    const auto rows_of = [&](const float* all) {
      const std::ptrdiff_t first = std::ptrdiff_t{h} * from.most * shape.dim;
      return std::span(all + first,
                       static_cast<std::size_t>(rows) * static_cast<std::size_t>(shape.dim));
    };
    plan.correct_keys(rows_of(from.key_correction), shape.dim);
    plan.correct_values(rows_of(from.value_correction), shape.dim);
  }
  if (!std::isnan(from.note[h])) {
    plan.set_note(from.note[h]);
  }
  return plan;
}

}  // namespace

corrections plan(const any_policy& policy, tensor_cache cache, const query_rows& reference,
                 std::span<const kvmeld::budget> budgets, const plan_output& out) {
  tensor_states states(policy, cache, 1);
  const auto& shape = cache.tensors().shape;
  std::vector<merge_plan> plans(static_cast<std::size_t>(cache.heads()));
  corrections all;
  for (index_t h = 0; h < cache.heads(); ++h) {
    const auto head = cache.head(h);
    const auto& budget = budgets[static_cast<std::size_t>(h)];
    kvmeld::check(policy, budget, head.capacity());
    kvmeld::head_state state = states[h];  // its own: nothing of the caller's is written
    state.extend(head.length());
    kvmeld::detail::expect_measured(policy, head, state, reference.count > 0, budget);
    merge_plan& made = plans[static_cast<std::size_t>(h)];
    kvmeld::plan(policy, head, state, reference.of(h), budget.slots, states.work().scratch, made);
    write(made, h, shape.capacity, out);
    all.most = made.has_correction() ? std::max(all.most, made.rows()) : all.most;
  }
  const auto floats = static_cast<std::size_t>(cache.heads()) * static_cast<std::size_t>(all.most) *
                      static_cast<std::size_t>(shape.dim);
  all.keys.resize(floats), all.values.resize(floats);
  for (index_t h = 0; h < cache.heads() && all.most > 0; ++h) {
    const merge_plan& made = plans[static_cast<std::size_t>(h)];
    const std::ptrdiff_t first = std::ptrdiff_t{h} * all.most * shape.dim;
    std::ranges::copy(made.key_corrections(), all.keys.begin() + first);
    std::ranges::copy(made.value_corrections(), all.values.begin() + first);
  }
  return all;
}

void apply(const any_policy& policy, tensor_cache cache, const plan_input& plan,
           std::span<const kvmeld::budget> budgets, const threads& run) {
  tensor_states states(policy, cache, run.workers());
  const auto& shape = cache.tensors().shape;
  std::vector<merge_plan> plans;
  for (index_t h = 0; h < cache.heads(); ++h) {  // all of them, before anything is written
    plans.push_back(read(plan, h, shape));
    expects(plans.back().length() == cache.head(h).length(), "apply: expected a plan of ",
            cache.head(h).length(), " slots, got ", plans.back().length(), " of head ", h);
    check(plans.back());
  }
  run(cache.heads(), [&](index_t h, index_t worker) {
    states[h].extend(cache.head(h).length());
    kvmeld::apply(policy, plans[static_cast<std::size_t>(h)], cache.head(h), states[h],
                  states.work(worker).scratch);
    if (!budgets.empty()) {
      kvmeld::traits::after_compress(policy, cache.head(h), states[h],
                                     budgets[static_cast<std::size_t>(h)].slots);
    }
  });
}

}  // namespace kvmeld_torch
