// SPDX-License-Identifier: MIT
/// Views of a cache, of a policy's state and of plans in device memory, all heads in one.
#pragma once

#include <cstddef>      // std::ptrdiff_t, std::size_t
#include <type_traits>  // std::is_trivially_copyable_v

#include "kvmeld/cuda/memory/narrow_rows.cuh"
#include "kvmeld/cuda/memory/plane.cuh"
#include "kvmeld/merge/source.hpp"

namespace kvmeld {
inline namespace v0 {
struct attention_spec;
}
}  // namespace kvmeld

namespace kvmeld::cuda {

/// This block's place among the heads that a call runs.
KVMELD_DEVICE inline index_t place_of_block() { return static_cast<index_t>(block_index().x); }

/// The heads that a call runs, for kernels without a cache; null: all.
struct active_heads {
  const index_t* list;

  KVMELD_DEVICE index_t head() const {
    return list == nullptr ? place_of_block() : list[place_of_block()];
  }
};

/// A model's soft cap, `{cap, scale}`: a logit is `cap · tanh(scale · q·k / cap) + log-mass`.
struct capped_logits {
  float cap = 0;  ///< 0: none
  float in = 0;   ///< 2^(in · dot) = e^(2 scale · dot / cap)
  float out = 0;  ///< of tanh; a product again, of which `scale` makes a logit

  capped_logits() = default;
  capped_logits(float soft_cap, float scale)
      : cap(soft_cap), in(2 * log2_e * scale / soft_cap), out(soft_cap / scale) {}
};

/// All KV heads (batch × layer × KV head, flattened), each with its own length.
template <class Scalar>
struct cache_view {
  using scalar = Scalar;

  plane<Scalar> keys, values;
  float* log_mass = nullptr;         ///< [heads, stride()]
  index_t* position = nullptr;       ///< [heads, stride()]
  index_t* length = nullptr;         ///< [heads] slots in use
  index_t* next_position = nullptr;  ///< [heads] tokens ever appended
  index_t heads = 0;
  index_t capacity = 0;
  index_t dim = 0;    ///< 1 to 256
  index_t group = 1;  ///< 1 to 128 query heads share a KV head
  float scale = 1;    ///< logit = scale · q·k + log-mass
  /// What the model computes in the layer, for policies that ask it. On the host, checked, alive as
  /// long as calls are made. Null: a model without rotation.
  const attention_spec* spec = nullptr;

  /// `[active_count]` heads on the device, each once, that calls run, −1 for none: a graph is
  /// captured with places for the most; null: all. Others stay as they are. Queries, new tokens and
  /// outputs are by place in the list; everything else is by head.
  const index_t* active = nullptr;
  index_t active_count = 0;

  /// The same cache for calls that run some heads only.
  cache_view with_active(const index_t* list, index_t count) const {
    cache_view x = *this;
    x.active = list, x.active_count = count;
    return x;
  }
  /// Heads that a call runs: a block each along the grid's x.
  unsigned blocks() const {
    return static_cast<unsigned>(active == nullptr ? heads : active_count);
  }
  /// This block's head.
  KVMELD_DEVICE index_t head() const { return active_heads{active}.head(); }

  /// Slots of each head in `log_mass`, `position` and a state: those of `capacity`, and more that
  /// calls leave alone. Held, not summed: kernels read it where it lies.
  index_t slot_stride = capacity;

  /// The first `slots` slots of each head alone, where no head has more: launches and workspaces
  /// are sized by these, and a head that has more is one without room.
  cache_view with_capacity(index_t slots) const {
    expects(slots >= 1 && slots <= stride(), "cuda: expected a capacity of 1 to ", stride(),
            " slots, got ", slots);
    cache_view x = *this;
    x.capacity = slots;
    return x;
  }
  /// Slots that a head has in arrays of the cache and of its state.
  KVMELD_HD index_t stride() const { return slot_stride; }

  /// As in `kvmeld::attention_spec`. Sinks are `[heads, group]`, on the device; null: none.
  capped_logits soft_cap = {};
  const float* sink_logits = nullptr;

  /// Of head `h`, slot 0.
  KVMELD_HD float* log_mass_of(index_t h) const { return log_mass + std::ptrdiff_t{h} * stride(); }
  KVMELD_HD index_t* position_of(index_t h) const {
    return position + std::ptrdiff_t{h} * stride();
  }

  /// In a call's own arrays [heads, capacity].
  KVMELD_HD std::ptrdiff_t slot(index_t h, index_t s) const {
    return std::ptrdiff_t{h} * capacity + s;
  }
  /// In arrays [heads, capacity + 1] of where rows begin; the last one ends where one more would.
  KVMELD_HD std::ptrdiff_t bound(index_t h, index_t r) const {
    return std::ptrdiff_t{h} * (capacity + 1) + r;
  }
  bool aligned() const { return keys.aligned() && values.aligned(); }
};

inline constexpr index_t max_dim = 256, max_group = 128, max_columns = 5;
/// Query heads that a block takes, at most: larger groups take several, each of which reads K and
/// V.
inline constexpr index_t group_block = 16;
/// A grid has at most 65,535 blocks along y and z, and a block takes at least 8 slots, or 64
/// queries of a group.
inline constexpr index_t max_capacity = 65535 * 8, max_queries = 65535 * 64 / group_block;

/// A policy's state: columns of a float a slot, and a flat memory of floats a head. Column `c` of
/// head `h`, slot `s` is at `columns[c · column_stride + h · head_stride + s]`, the memory of head
/// `h` at `memory[h · memory_stride]`. `make_state_view` makes one.
struct state_view {
  float* columns = nullptr;
  index_t count = 0;                     ///< columns, at most `max_columns`
  slot_reduce merges[max_columns] = {};  ///< what becomes of a column's numbers when slots merge
  float initial[max_columns] = {};       ///< numbers of a new slot
  std::ptrdiff_t column_stride = 0;      ///< floats, column to column
  std::ptrdiff_t head_stride = 0;        ///< floats, head to head; at least the capacity
  float* memory = nullptr;
  index_t floats = 0;                ///< of memory, a head
  std::ptrdiff_t memory_stride = 0;  ///< floats, head to head; at least `floats`

  /// Column 0 of head `h`, slot 0.
  KVMELD_HD float* columns_of(index_t h) const { return columns + h * head_stride; }
  KVMELD_HD float* column(index_t c, index_t h) const { return columns_of(h) + c * column_stride; }
  KVMELD_HD float* memory_of(index_t h) const { return memory + h * memory_stride; }
};

/// Plans of all heads in device memory. A head with `rows[h] < 0` stays as it is.
struct plan_view {
  index_t* rows = nullptr;                  ///< [heads]
  index_t* begin = nullptr;                 ///< [heads, capacity + 1] row → its first source
  merge_source* sources = nullptr;          ///< [heads, capacity]
  float* log_mass = nullptr;                ///< [heads, capacity] of the rows
  const float* key_correction = nullptr;    ///< [heads, capacity, dim], or null: none
  const float* value_correction = nullptr;  ///< the same
};

static_assert(std::is_trivially_copyable_v<cache_view<float>> &&
              std::is_trivially_copyable_v<state_view> && std::is_trivially_copyable_v<plan_view>);

/// Refuses a cache that the kernels cannot take.
template <class Scalar>
void check(const cache_view<Scalar>& cache) {
  expects(cache.dim >= 1 && cache.dim <= max_dim, "cuda: expected a dim of 1 to ", max_dim,
          ", got ", cache.dim);
  expects(cache.group >= 1 && cache.group <= max_group, "cuda: expected a group of 1 to ",
          max_group, ", got ", cache.group);
  for (const plane<Scalar>* rows : {&cache.keys, &cache.values}) {
    expects(
        rows->table == nullptr || (rows->slots.slots >= 1 && rows->heads >= 1 &&
                                   std::int64_t{rows->pages} * rows->slots.slots >= cache.capacity),
        "cuda: expected pages for ", cache.capacity, " slots, got ", rows->pages, " of ",
        rows->slots.slots, " slots");
    if constexpr (in_blocks<Scalar>) {
      expects(rows->template aligned<2>(),
              "cuda: expected rows of q8_0 at multiples of 2 bytes, got others");
    }
  }
  expects(cache.active == nullptr ? cache.active_count == 0
                                  : cache.active_count >= 0 && cache.active_count <= cache.heads,
          "cuda: expected a list of 0 to ", cache.heads, " active heads, got ", cache.active_count);
  expects(cache.heads >= 0 && cache.capacity >= 1 && cache.capacity <= max_capacity,
          "cuda: expected at least 0 heads and a capacity of 1 to ", max_capacity, " slots, got ",
          cache.heads, " heads and ", cache.capacity, " slots");
  const capped_logits& x = cache.soft_cap;
  expects(x.cap == 0 || (x.in > 0 && x.out > 0 && x.out == x.cap / cache.scale),
          "cuda: expected a soft_cap above 0 with the cache's scale, got ", x.cap);
  expects(cache.stride() >= cache.capacity, "cuda: expected a slot_stride of at least ",
          cache.capacity, " slots, got ", cache.stride());
  expects(cache.keys.data != nullptr && cache.values.data != nullptr && cache.log_mass != nullptr &&
              cache.position != nullptr && cache.length != nullptr &&
              cache.next_position != nullptr,
          "cuda: expected keys, values, log_mass, position, length and next_position, got null");
}

/// Refuses a state that lacks `columns` columns or `floats` floats of memory a head.
template <class Scalar>
void check(const state_view& state, const cache_view<Scalar>& cache, index_t columns,
           std::size_t floats, const char* what) {
  expects(state.count >= columns && state.count <= max_columns, what, ": expected a state of ",
          columns, " to ", max_columns, " columns, got ", state.count);
  if (state.count > 0) {
    expects(state.columns != nullptr, what, ": expected the columns of a state, got null");
    expects(state.column_stride >= cache.stride() && state.head_stride >= cache.stride(), what,
            ": expected a column_stride and a head_stride of at least ", cache.stride(), ", got ",
            state.column_stride, " and ", state.head_stride);
  }
  if (floats > 0) {
    expects(state.floats >= 0 && static_cast<std::size_t>(state.floats) >= floats, what,
            ": expected a state of ", floats, " floats of memory per head, got ", state.floats);
    expects(state.memory != nullptr && state.memory_stride >= state.floats, what,
            ": expected the memory of a state with a stride of at least ", state.floats,
            " floats, got ", state.memory == nullptr ? 0 : state.memory_stride);
  }
}

inline void check(const plan_view& plan, const char* what) {
  expects(plan.rows != nullptr && plan.begin != nullptr && plan.sources != nullptr &&
              plan.log_mass != nullptr,
          what, ": expected the rows, begin, edges and log_mass of a plan, got null");
}

// ---------------------------------------------------------------------------- rows

/// `x·x` of a row `[dim]`, by a warp.
template <class Scalar>
KVMELD_DEVICE float square_of(const Scalar* row, index_t dim, bool aligned) {
  constexpr index_t width = vector_16<Scalar>::size;
  float sum = 0;
  for (index_t i = lane() * width; i < dim; i += 32 * width) {
    const auto x = load_row(row, i, dim, aligned);
    KVMELD_UNROLL
    for (index_t j = 0; j < width; ++j) {
      sum += to_float(x[j]) * to_float(x[j]);
    }
  }
  return reduce_sum(sum);
}

}  // namespace kvmeld::cuda
