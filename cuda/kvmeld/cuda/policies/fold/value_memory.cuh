// SPDX-License-Identifier: MIT
/// What fold's fit of values works in.
#pragma once

#include "kvmeld/cuda/memory/plan_memory.cuh"
#include "kvmeld/cuda/merge/ridge_system.cuh"

namespace kvmeld::cuda::detail {

/// The rows of a plan as floats, `[heads, most, pitch]`.
struct plan_rows {
  float *key, *value;
  index_t most, pitch;

  KVMELD_DEVICE std::ptrdiff_t at(index_t h, index_t r) const {
    return (std::ptrdiff_t{h} * most + r) * pitch;
  }
  /// The same memory as `[heads, most, 2, dim]` of 16 bits: what numbers round to, and the rest.
  template <class Scalar>
  KVMELD_DEVICE Scalar* key_parts(index_t h, index_t r) const {
    return reinterpret_cast<Scalar*>(key + at(h, r));
  }
  template <class Scalar>
  KVMELD_DEVICE Scalar* value_parts(index_t h, index_t r) const {
    return reinterpret_cast<Scalar*>(value + at(h, r));
  }
};

/// Of all query heads' reference queries together.
struct value_scratch {
  static constexpr index_t queries_a_part = 16;

  plan_rows rows;
  ridge_system system;       ///< the unknowns are the rows that may change
  float* probabilities;      ///< [heads, queries, rows]; overwritten by the system
  float* missing;            ///< [heads, queries, dim]
  float *squares, *largest;  ///< [heads, parts] of probabilities in the system, and of `missing`
  index_t *unknowns, *row;   ///< [heads], and [heads, capacity] of each unknown
  index_t* place;            ///< [heads, capacity] the unknown of each row; −1: none
  float* correction;         ///< [heads, capacity, dim]; null: values are not fitted

  index_t parts() const { return system.depth / queries_a_part; }
};

/// `fits`: are values fitted, or masses alone?
inline value_scratch allocate_values(workspace_allocator& from, const work_shape& shape,
                                     bool fits) {
  const std::size_t n = shape.all_heads(), slots = shape.slots();
  const index_t all = shape.group * shape.queries, pitch = pitch_of(shape.dim);
  const auto queries = n * static_cast<std::size_t>(all), d = static_cast<std::size_t>(shape.dim),
             most = static_cast<std::size_t>(shape.target);
  value_scratch v{};
  v.rows = {from.take<float>(n * most * static_cast<std::size_t>(pitch)),
            from.take<float>(n * most * static_cast<std::size_t>(pitch)), shape.target, pitch};
  v.unknowns = from.take<index_t>(n), v.row = from.take<index_t>(slots);
  v.place = from.take<index_t>(slots);
  if (fits) {
    v.system = allocate_ridge(from, n, shape.target, shape.dim, all,
                              shape.number_bytes == 4 ? 2 : 1, queries * most);
    v.probabilities = v.system.data;
    v.missing = from.take<float>(queries * d);
    const std::size_t parts = n * static_cast<std::size_t>(v.parts());
    v.squares = from.take<float>(parts), v.largest = from.take<float>(parts);
    v.correction = from.take<float>(slots * d);
    v.system.unknowns = v.unknowns;
  }
  return v;
}

}  // namespace kvmeld::cuda::detail
