/// What calls work in, carved from one workspace: what one phase has left may be overwritten by the
/// next, but for the tickets.
#pragma once

#include <cstddef>  // std::size_t

#include "kvfold/cuda/memory/plan_memory.cuh"

namespace kvfold::cuda {

/// Bytes of workspace for `column_scores`: the queries' log-sum-exp.
inline std::size_t column_scores_workspace_bytes(index_t heads, index_t group, index_t queries) {
  return sizeof(float) * static_cast<std::size_t>(heads) * static_cast<std::size_t>(group) *
         static_cast<std::size_t>(queries);
}

namespace detail {

inline constexpr index_t most_splits = 128;

/// What the first launch leaves for the second.
struct partial_attention {
  index_t* tickets;  // [heads] blocks of the second launch that are done; 0 between steps
  float* logits;     // [heads, capacity, group], or null: nobody observes
  float* max;        // [heads, splits, group] of the logits
  float* sum;        // [heads, splits, group] Σ exp(ℓ − max)
  float* out;        // [heads, splits, group, dim] Σ exp(ℓ − max) v
  unsigned long long* removed;  // [heads, near_tiles] best candidate of each tile of a launch
  index_t* victims;             // [heads] who leaves for the nearest; −1: nobody
  index_t splits;
  index_t tiles;
  index_t near_tiles;
};

inline constexpr index_t slots_a_tile = 1024;      // of the second launch
inline constexpr index_t slots_a_near_tile = 256;  // of the search for the nearest

/// As many blocks as keep an H100's 132 multiprocessors busy (8 each), but no fewer than 256 slots
/// for each at full capacity. By shape alone: the same bytes whatever the device.
inline index_t splits_of(index_t heads, index_t capacity) {
  const index_t wanted = (132 * 8 + heads - 1) / (heads < 1 ? 1 : heads);
  const index_t most = (capacity + 255) / 256;
  const index_t splits = wanted < most ? wanted : most;
  return splits < 1 ? 1 : splits > most_splits ? most_splits : splits;
}

/// All but the tickets.
inline void allocate(partial_attention& p, workspace_allocator& from, index_t heads,
                     index_t capacity, index_t group, index_t dim) {
  p.splits = splits_of(heads, capacity);
  p.tiles = (capacity + slots_a_tile - 1) / slots_a_tile;
  p.near_tiles = (capacity + slots_a_near_tile - 1) / slots_a_near_tile;
  const auto n = static_cast<std::size_t>(heads), g = static_cast<std::size_t>(group);
  const auto parts = n * static_cast<std::size_t>(p.splits) * g;
  p.logits = from.take<float>(n * static_cast<std::size_t>(capacity) * g);
  p.max = from.take<float>(parts);
  p.sum = from.take<float>(parts);
  p.out = from.take<float>(parts * static_cast<std::size_t>(dim));
  p.removed = from.take<unsigned long long>(n * static_cast<std::size_t>(p.near_tiles));
  p.victims = from.take<index_t>(n);
}

/// What a step works in: the splits' attention, then plans in the same memory.
struct step_memory {
  partial_attention partial;
  plan_memory plan;
};

inline step_memory allocate_step(workspace_allocator& from, index_t heads, index_t capacity,
                                 index_t group, index_t dim, bool plans, const plan_needs& needs) {
  step_memory m{};
  m.partial.tickets = from.take<index_t>(static_cast<std::size_t>(heads));
  workspace_allocator plan = from;
  allocate(m.partial, from, heads, capacity, group, dim);
  if (plans) {
    m.plan = carve_plan(plan, heads, capacity, group, dim, needs);
    from.reserve(plan.used());
  } else if (needs.entries.window > 0) {  // beside what attention leaves
    m.plan.entries = carve_entries(from, heads, capacity, dim, needs.entries);
  }
  return m;
}

/// What `compress` works in: column sums, then plans in the same memory.
struct prompt_memory {
  float *sums, *last;  // [heads, capacity]; of the last window
  index_t *order, *spare;
  workspace log_sums;
  plan_memory plan;
};

inline prompt_memory allocate_prompt(workspace_allocator& from, index_t heads, index_t capacity,
                                     index_t group, index_t dim, index_t queries,
                                     const plan_needs& needs) {
  const std::size_t slots = static_cast<std::size_t>(heads) * static_cast<std::size_t>(capacity);
  from.take<index_t>(static_cast<std::size_t>(heads));  // the tickets of steps stay 0
  workspace_allocator measure = from;
  prompt_memory m{};
  m.sums = measure.take<float>(slots);
  m.last = needs.entries.window > 0 ? measure.take<float>(slots) : nullptr;
  m.order = measure.take<index_t>(slots), m.spare = measure.take<index_t>(slots);
  const std::size_t bytes = column_scores_workspace_bytes(heads, group, queries);
  m.log_sums = {measure.take<char>(bytes), bytes};
  m.plan = carve_plan(from, heads, capacity, group, dim, needs);
  from.reserve(measure.used());
  return m;
}

}  // namespace detail

/// Bytes of workspace for `attend` and `attend_observe`.
template <class Scalar>
std::size_t workspace_bytes(const cache_view<Scalar>& cache) {
  workspace_allocator count;
  detail::allocate_step(count, cache.heads, cache.capacity, cache.group, cache.dim, false, {});
  return count.used();
}

/// Bytes of workspace for `compress` with `queries` queries a query head, and for `step`: the
/// larger. One workspace may serve both, on one stream. `target`: of `compress`; 0: any. Of fold it
/// takes much more.
template <class Policy, class Scalar>
std::size_t workspace_bytes(const Policy& policy, const cache_view<Scalar>& cache,
                            index_t queries = 0, index_t target = 0) {
  const auto rule = rule_of(policy, budget{});
  workspace_allocator prompt;
  detail::allocate_prompt(
      prompt, cache.heads, cache.capacity, cache.group, cache.dim, queries,
      detail::plan_needs::of(rule, queries, target > 0 ? target : cache.capacity));
  for (const bool plans : {false, static_cast<bool>(rule.leaves)}) {
    workspace_allocator decode;
    detail::allocate_step(decode, cache.heads, cache.capacity, cache.group, cache.dim, plans,
                          detail::plan_needs::of(rule));
    prompt.reserve(decode.used());
  }
  return prompt.used();
}

}  // namespace kvfold::cuda
