// SPDX-License-Identifier: MIT
/// fold as the kernels know it, and what it remembers of a head.
#pragma once

#include <cstddef>  // std::ptrdiff_t

#include "kvmeld/cuda/memory/rope_params.cuh"
#include "kvmeld/cuda/score/rule.cuh"
#include "kvmeld/policies/fold/layout.hpp"
#include "kvmeld/score/observation.hpp"

namespace kvmeld::cuda {

/// `kvmeld::fold_prompt`
struct prompt_options {
  index_t pool = 5;
  float outlier = 1.6F;
  index_t rounds = 4;
  float floor = 0.1F, ridge = 0.002F;
};

namespace detail {

/// `kvmeld::detail::fold_memory` in a head's floats.
struct fold_floats : kvmeld::detail::fold_layout {
  float* floats;

  KVMELD_DEVICE index_t get(const kvmeld::integer_field& f, index_t i = 0) const {
    return f.get(floats, i);
  }
  KVMELD_DEVICE void set(const kvmeld::integer_field& f, index_t x, index_t i = 0) const {
    f.set(floats, x, i);
  }

  /// Queries held per query head; query `i` is the `i`-th oldest.
  KVMELD_DEVICE index_t count() const { return get(held); }
  KVMELD_DEVICE index_t slot_of(index_t i) const {
    return fold_layout::slot_of(i, get(held), get(newest));
  }
  KVMELD_DEVICE bfloat16* at(index_t g, index_t slot) const {
    return reinterpret_cast<bfloat16*>(query.row(floats, std::ptrdiff_t{slot} * group + g));
  }
  struct positions {
    index_t begin, end;
  };
  /// Of the prompts that have been scored.
  KVMELD_DEVICE positions scored() const { return {get(prompt_begin), get(prompt_end)}; }
  KVMELD_DEVICE void set_scored(const positions& p) const {
    set(prompt_begin, p.begin), set(prompt_end, p.end);
  }

  /// A step's query `[group, dim]`. Every `stride`-th is held, and always the newest. By a block.
  template <index_t Threads, class Scalar>
  KVMELD_DEVICE void remember(const Scalar* q, index_t at_position, index_t stride) const {
    if (queries == 0) {
      return;
    }
    const index_t slot = get(next), step = get(steps), count = get(held);
    for (index_t i = thread_index(); i < group * dim; i += Threads) {
      at(i / dim, slot)[i % dim] = from_float<bfloat16>(to_float(q[i]));
    }
    sync_block();  // all have read
    if (thread_index() == 0) {
      set(fold_layout::position, at_position, slot);
      set(held, count > slot + 1 ? count : slot + 1);
      set(newest, slot);
      set(next, next_slot(slot, step, stride));
      set(steps, (step + 1) % stride);
    }
  }
};

struct fold_plan_memory;

}  // namespace detail

/// Its plans are made on queries that it remembers: nothing is observed of a step but these, of a
/// prompt by scores what they will look up. Slots are never merged one by one.
struct fold_rule {
  static constexpr index_t columns = 1;
  static constexpr bool observes = false, observes_prompts = true, evicts = true, merges = true,
                        always_plans = true, remembers = true, plain_attention = true;
  using plan_memory = detail::fold_plan_memory;
  enum column_name : index_t { tokens, prompt_score };
  group_combine combine = group_combine::sum;
  kvmeld::detail::fold_pins pins = {};
  bool by_scores = false;
  index_t score_horizon = 64;  ///< positions after the prompt that its queries are moved to
  float leverage_ridge = 1;
  index_t queries = 4, stride = 8, period = 0;
  index_t horizon = 256;
  double fade = 16;
  prompt_options prompt = {};
  rope_params turn = {};

  KVMELD_HD index_t freed(index_t slots) const { return kvmeld::detail::fold_freed(period, slots); }
  KVMELD_HD bool gains() const { return by_scores && pins.mean > 0 && pins.gain > 0; }
  /// In a plan of a step for a head of `n` slots: as many as there will be before the next one.
  KVMELD_HD index_t slots_before_next(index_t n, index_t target) const {
    const index_t slots = target + freed(target) - 1;
    return n - 1 < slots ? n - 1 : slots;
  }
  /// `kvmeld::future_positions`
  KVMELD_DEVICE index_t ahead(index_t i, index_t n) const {
    return kvmeld::score::future_position(i, n, horizon, fade);
  }

  /// Floats of the state's memory, a head.
  std::size_t memory(index_t dim, index_t group, index_t) const {
    return static_cast<std::size_t>(kvmeld::detail::fold_layout{queries, group, dim}.all.size);
  }
  /// What it remembers of head `h`.
  template <class Scalar>
  KVMELD_DEVICE detail::fold_floats memory_of(const cache_view<Scalar>& cache,
                                              const state_view& state, index_t h) const {
    return {{queries, cache.group, cache.dim}, state.memory + h * state.memory_stride};
  }
  /// ... of which the header alone is asked.
  KVMELD_DEVICE detail::fold_floats memory_of(const head_context& head) const {
    return {{queries, 1, 1}, head.memory};
  }
  /// Of a step, `query [group, dim]` at `position`. By a block.
  template <index_t Threads, class Scalar>
  KVMELD_DEVICE void remember(const cache_view<Scalar>& cache, const state_view& state, index_t h,
                              const row_number<Scalar>* query, index_t position) const {
    memory_of(cache, state, h).template remember<Threads>(query, position, stride);
  }
  KVMELD_DEVICE void observed(const head_context&) const {}
  KVMELD_DEVICE bool is_protected(const head_context&, index_t) const { return true; }
  KVMELD_DEVICE unsigned order(const head_context&, index_t) const { return 0; }
};

}  // namespace kvmeld::cuda
