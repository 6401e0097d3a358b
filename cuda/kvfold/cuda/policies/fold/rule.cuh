/// fold as the kernels know it, and what it remembers of a head.
#pragma once

#include <cstring>  // std::memcpy

#include "kvfold/cuda/memory/rope_params.cuh"
#include "kvfold/cuda/score/rule.cuh"
#include "kvfold/policies/fold/layout.hpp"
#include "kvfold/score/future_positions.hpp"

namespace kvfold::cuda {

/// `kvfold::fold_prompt` but for the polish.
struct prompt_options {
  index_t pool = 5;
  float outlier = 1.6F;
  index_t rounds = 4;
  float floor = 0.1F, ridge = 0.002F;
};

namespace detail {

/// `kvfold::detail::fold_memory` in a head's floats.
struct fold_floats : kvfold::detail::fold_layout {
  float* floats;

  KVFOLD_DEVICE index_t get(index_t i) const {
    index_t x = 0;
    memcpy(&x, floats + i, sizeof x);
    return x;
  }
  KVFOLD_DEVICE void set(index_t i, index_t x) const { memcpy(floats + i, &x, sizeof x); }

  /// Queries held per query head; query `i` is the `i`-th oldest.
  KVFOLD_DEVICE index_t count() const { return get(held); }
  KVFOLD_DEVICE index_t slot_of(index_t i) const {
    return fold_layout::slot_of(i, get(held), get(newest));
  }
  KVFOLD_DEVICE bfloat16* at(index_t g, index_t slot) const {
    return reinterpret_cast<bfloat16*>(floats + query(g, slot));
  }

  /// A step's query `[group, dim]`. Every `stride`-th is held, and always the newest. By a block.
  template <index_t Threads, class Scalar>
  KVFOLD_DEVICE void remember(const Scalar* q, index_t position, index_t stride) const {
    if (queries == 0) {
      return;
    }
    const index_t slot = get(next), step = get(steps), count = get(held);
    for (index_t i = thread_index(); i < group * dim; i += Threads) {
      at(i / dim, slot)[i % dim] = from_float<bfloat16>(to_float(q[i]));
    }
    sync_block();  // all have read
    if (thread_index() == 0) {
      set(header + slot, position);
      set(held, count > slot + 1 ? count : slot + 1);
      set(newest, slot);
      set(next, next_slot(slot, step, stride));
      set(steps, (step + 1) % stride);
    }
  }
};

struct fold_plan_memory;

}  // namespace detail

/// Its plans are made on queries that it remembers: nothing is observed but these. Slots are never
/// merged one by one.
struct fold_rule {
  static constexpr index_t columns = 1;
  static constexpr bool observes = false, evicts = true, merges = true, always_plans = true,
                        remembers = true;
  using plan_memory = detail::fold_plan_memory;
  enum column_name : index_t { tokens };
  group_combine combine = group_combine::sum;
  index_t sinks = 4, recent = 24;
  float recent_share = 0.25F, share = 0.5F;
  float leverage_ridge = 1;
  index_t queries = 16, stride = 4, period = 0;
  index_t horizon = 256;
  double fade = 16;
  prompt_options prompt = {};
  rope_params turn = {};

  KVFOLD_HD index_t freed(index_t slots) const { return kvfold::detail::fold_freed(period, slots); }
  KVFOLD_HD index_t recent_of(index_t slots) const {
    return kvfold::detail::fold_recent(recent, recent_share, slots);
  }
  /// `kvfold::future_positions`
  KVFOLD_DEVICE index_t ahead(index_t i, index_t n) const {
    return kvfold::score::future_position(i, n, horizon, fade);
  }

  /// Floats of the state's memory, a head.
  std::size_t memory(index_t dim, index_t group, index_t) const {
    return static_cast<std::size_t>(kvfold::detail::fold_layout{queries, group, dim}.size());
  }
  /// What it remembers of head `h`.
  template <class Scalar>
  KVFOLD_DEVICE detail::fold_floats memory_of(const cache_view<Scalar>& cache,
                                              const state_view& state, index_t h) const {
    return {{queries, cache.group, cache.dim}, state.memory + h * state.memory_stride};
  }
  /// Of a step, `query [group, dim]` at `position`. By a block.
  template <index_t Threads, class Scalar>
  KVFOLD_DEVICE void remember(const cache_view<Scalar>& cache, const state_view& state, index_t h,
                              const Scalar* query, index_t position) const {
    memory_of(cache, state, h).template remember<Threads>(query, position, stride);
  }
  KVFOLD_DEVICE void observed(const head_context&) const {}
  KVFOLD_DEVICE bool is_protected(const head_context&, index_t) const { return true; }
  KVFOLD_DEVICE unsigned order(const head_context&, index_t) const { return 0; }
};

namespace detail {

/// Which slots keep their bytes in a plan of fold's: the protected, and of those that hold one
/// token the highest leverage above `least`, up to their share. For `select`.
struct pin_rule {
  static constexpr bool evicts = true;
  fold_rule fold;
  const float* leverage;         // [heads, capacity]
  const float* least = nullptr;  // [heads]; null: whatever it is
  bool decodes;                  // as many slots as there will be before the next plan
  index_t target = 0, latest = 0, outliers = 0;

  KVFOLD_DEVICE void of_target(index_t slots) { target = slots; }
  KVFOLD_DEVICE void of_length(index_t n) {
    index_t slots = target;
    if (decodes) {
      slots = target + fold.freed(target) - 1;
      slots = n - 1 < slots ? n - 1 : slots;
    }
    latest = fold.recent_of(slots);
    outliers = static_cast<index_t>(fold.share * static_cast<float>(slots - fold.sinks - latest));
    outliers = outliers > 0 ? outliers : 0;
  }
  KVFOLD_DEVICE bool is_protected(const head_context& head, index_t s) const {
    return search::protection{fold.sinks, latest, head.newest}(head.position[s]);
  }
  KVFOLD_DEVICE bool outlying(const head_context& head, index_t s) const {
    const float x = leverage[head.first + s];
    return head.column(fold_rule::tokens, s) == 1.0F &&
           (least == nullptr ? x == x : x > least[head.head]);
  }
  KVFOLD_DEVICE bool counted(const head_context& head, index_t s) const {
    return !is_protected(head, s) && outlying(head, s);
  }
  KVFOLD_DEVICE void prepare(index_t candidates) {
    outliers = candidates < outliers ? candidates : outliers;
  }
  KVFOLD_DEVICE index_t free(index_t, index_t) const { return outliers; }
  KVFOLD_DEVICE unsigned order(const head_context& head, index_t s) const {
    return ordered(outlying(head, s) ? leverage[head.first + s] : lowest_score);
  }
};

}  // namespace detail

}  // namespace kvfold::cuda
