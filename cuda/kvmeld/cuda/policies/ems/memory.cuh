// SPDX-License-Identifier: MIT
/// What EMS's plans work in.
#pragma once

#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/policies/ems/rule.cuh"

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
    m.turned = from.take<float>(slots * static_cast<std::size_t>(m.pitch));
  }
  return m;
}

struct ems_plan_memory : plan_memory {
  entry_scratch entries;

  void allocate(workspace_allocator& from, const ems_rule& rule, const work_shape& shape) {
    plan_memory::allocate(from, rule, shape);
    allocate_scratch(from, rule, shape);
  }
  /// What a step works in that makes no plans.
  void allocate_scratch(workspace_allocator& from, const ems_rule& rule, const work_shape& shape) {
    entries = allocate_entries(from, rule, shape);
  }
};

}  // namespace kvmeld::cuda::detail
