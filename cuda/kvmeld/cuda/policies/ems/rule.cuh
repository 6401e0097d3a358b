// SPDX-License-Identifier: MIT
/// EMS as the kernels know it.
#pragma once

#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/memory/rope_params.cuh"
#include "kvmeld/cuda/memory/wide_rows.cuh"
#include "kvmeld/cuda/policies/ems/weights.cuh"
#include "kvmeld/cuda/score/rule.cuh"

namespace kvmeld::cuda {

namespace detail {
struct ems_plan_memory;
}  // namespace detail

/// EMS: tokens that are alike share one entry (a slot), each with its own norm and scores.
struct ems_rule {
  static constexpr index_t columns = 5;
  static constexpr bool observes = true, evicts = true, merges = true, always_plans = true,
                        shares = true, plain_attention = true;
  using plan_memory = detail::ems_plan_memory;
  group_combine combine = group_combine::sum;
  index_t sinks = 4, window = 32, kernel = 7;
  float gamma = 4, threshold = 0.6F;
  bool with_position = true;
  index_t table = 0;
  rope_params turn = {};  ///< without position only

  /// (γ − 1) times so many, rounded.
  KVMELD_HD double beyond(index_t slots) const {
    return static_cast<double>(static_cast<long long>((double{gamma} - 1) * slots + 0.5));
  }
  /// Places of a head's table.
  KVMELD_HD index_t places(index_t slots) const {
    return table > 0 ? table : static_cast<index_t>(beyond(slots));
  }
  /// Floats of the state's memory, a head.
  std::size_t memory(index_t, index_t group, index_t slots) const {
    using entries = detail::entry_table;
    return static_cast<std::size_t>(entries::header + 2 * group) +
           static_cast<std::size_t>(places(slots)) * entries::place_size;
  }
  /// Tokens that may share the entries of so many slots.
  KVMELD_HD index_t max_sharing(index_t slots, index_t places) const {
    return beyond(slots) < places ? static_cast<index_t>(beyond(slots)) : places;
  }

  /// Does this query fill the window?
  KVMELD_DEVICE bool full(const head_context& head) const {
    return head.memory[0] + 1 >= static_cast<float>(window);
  }
  /// By one thread, when all slots have been observed.
  KVMELD_DEVICE void observed(const head_context& head) const {
    head.memory[0] = full(head) ? 0.0F : head.memory[0] + 1;
  }
  KVMELD_DEVICE bool is_protected(const head_context& head, index_t s) const {
    return protection{sinks, window, head.newest}(head.position[s]);
  }
  /// The mass function of attention.
  KVMELD_HD detail::entry_masses masses(const state_view& state, index_t slots) const {
    return {state, places(slots)};
  }
  template <class Scalar>
  KVMELD_DEVICE detail::entry_table tokens_of(const cache_view<Scalar>& cache,
                                              const state_view& state, index_t h,
                                              index_t newest) const {
    return detail::entry_table::of(cache, state, h, newest, places(cache.stride()));
  }
  /// A step's attention into the tokens of slot `s`, by a thread: each has exp(ℓ_t), of which
  /// `probability(g, ℓ)` makes a share. `logits [group]`: of `masses`. A new key is measured first.
  template <class Scalar, class Probability>
  KVMELD_DEVICE void observe_entry(const cache_view<Scalar>& cache, const state_view& state,
                                   index_t h, index_t s, const float* logits,
                                   Probability probability) const {
    using entries = detail::entry_table;
    const entries tokens = tokens_of(cache, state, h, 0);
    float& own = tokens.at(entries::norm, s);
    if (own < 0) {
      const Scalar* const key = cache.keys.of(h).at(s);
      float square = 0;
      for (index_t i = 0; i < cache.dim; ++i) {
        const float x = load_number(key, i, cache.dim);
        square += x * x;
      }
      own = square_root(square);
    }
    const bool shared = tokens.shared(s), fills = full(tokens.head);
    tokens.each(s, [&](index_t t) {
      const float norm = shared ? tokens.at(entries::norm, t) : 1.0F;
      tokens.credit(t,
                    combined(combine, cache.group,
                             [&](index_t g) { return probability(g, norm * logits[g]); }),
                    fills);
    });
  }
};

}  // namespace kvmeld::cuda

namespace kvmeld::cuda::detail {

inline entry_scratch allocate_entries(workspace_allocator& from, const ems_rule& rule,
                                      const work_shape& shape) {
  entry_scratch m{};
  m.places = rule.places(shape.stride), m.names = shape.stride + m.places;
  m.pitch = pitch_of(shape.dim);
  const std::size_t slots = shape.slots(),
                    tokens = shape.all_heads() * static_cast<std::size_t>(m.names);
  m.key_length = from.take<float>(slots), m.value_length = from.take<float>(slots);
  m.weight = from.take<float>(slots);
  m.score = from.take<float>(tokens), m.raw = from.take<float>(tokens);
  m.order = from.take<index_t>(tokens), m.spare = from.take<index_t>(tokens);
  m.freed = from.take<index_t>(tokens), m.mark = from.take<index_t>(tokens);
  if (!rule.with_position) {
    m.turned = from.take<float>(2 * slots * static_cast<std::size_t>(m.pitch));
  }
  return m;
}

struct ems_plan_memory : plan_memory {
  wide_memory wide;
  entry_scratch entries;

  void allocate(workspace_allocator& from, const ems_rule& rule, const work_shape& shape) {
    wide.allocate(from, shape, true);
    plan_memory::allocate(from, rule, shape);
    entries = allocate_entries(from, rule, shape);
  }
};

}  // namespace kvmeld::cuda::detail
