// SPDX-License-Identifier: MIT
/// A cache's tensors, and queries beside them, on the CPU or on a GPU.
#pragma once

#include <algorithm>  // std::max
#include <cstddef>    // std::ptrdiff_t
#include <cstdint>    // std::int64_t
#include <memory>     // std::shared_ptr
#include <vector>

#include "kvmeld/memory/cache.hpp"
#include "kvmeld/score/queries.hpp"

namespace kvmeld_torch {

using kvmeld::index_t;

struct tensor_shape {
  index_t heads = 0;
  index_t group = 1;
  index_t dim = 0;        ///< of keys, and queries
  index_t value_dim = 0;  ///< of values, and outputs
  index_t capacity = 0;   ///< of the head that has most

  index_t row_dim() const { return std::max(dim, value_dim); }
};

/// Where the keys, or the values, of heads lie: strides in bytes.
struct tensor_rows {
  std::byte* data = nullptr;
  std::ptrdiff_t head = 0, row = 0, element = 1, page = 0;

  /// Of head `h`; packed: from the place `first` on.
  kvmeld::head_rows of(index_t h, std::ptrdiff_t first) const {
    return {data + h * head + first * row, row, element};
  }
};

/// An engine's pages of keys and values, on a GPU alone.
struct page_tensors {
  const index_t* table = nullptr;  ///< [sequences, pages]; null: no pages
  index_t pages = 0;
  index_t heads = 0;  ///< KV heads of a sequence
  index_t slots = 0;  ///< of a page
};

/// Where the numbers of a cache lie. All but keys and values is contiguous.
struct cache_tensors {
  tensor_shape shape;
  /// Packed: heads of their own capacities in one row of places `[places]`, and where each one's
  /// end. Empty: `shape.capacity` places each.
  std::vector<std::ptrdiff_t> ends;
  std::shared_ptr<const kvmeld::attention_spec> spec;  ///< heads point to it
  kvmeld::storage_pair type = kvmeld::storage::f32;
  /// Of head 0, rows in few bits: the newest `[heads, rows in half, dim]`, means `[heads, dim]`.
  kvmeld::rows_beside beside;
  page_tensors paged;
  tensor_rows keys, values;   ///< [heads, capacity, dim or value_dim]
  float* log_mass = nullptr;  ///< [heads, capacity], as `position`; packed [places]
  index_t* position = nullptr;
  index_t* length = nullptr;  ///< [heads] slots in use
  index_t* seen = nullptr;    ///< [heads] tokens ever appended
  float* columns = nullptr;   ///< of each head [column_count, its capacity]
  index_t column_count = 0;
  float* memory = nullptr;  ///< [heads, memory_row]: a policy's own, rows of whole cache lines
  std::ptrdiff_t memory_row = 0;
  /// [heads, 3] slots with columns, queries observed, the capacity that `memory` was laid out for;
  /// packed [heads, 4]: and the head's capacity
  std::int64_t* measured = nullptr;
  std::ptrdiff_t measured_row = 3;

  /// Of head `h`, its first place among those of all heads, and how many it has.
  std::ptrdiff_t first(index_t h) const {
    return ends.empty() ? std::ptrdiff_t{h} * shape.capacity
           : h == 0     ? 0
                        : ends[static_cast<std::size_t>(h) - 1];
  }
  index_t capacity(index_t h) const { return static_cast<index_t>(first(h + 1) - first(h)); }

  kvmeld::rows_beside beside_of(index_t h) const {
    using kvmeld::row_bytes, kvmeld::storage;
    kvmeld::rows_beside of = beside;
    if (of.newest.count > 0) {
      const auto row = static_cast<std::size_t>(h) *
                       static_cast<std::size_t>(kvmeld::rows_in_half(of.newest.count));
      of.newest.keys += row * row_bytes(storage::f16, shape.dim);
      of.newest.values += row * row_bytes(storage::f16, shape.value_dim);
      of.newest.rounded += h;
    }
    if (of.key_mean != nullptr) {
      of.key_mean += std::ptrdiff_t{h} * shape.dim;
    }
    return of;
  }
};

/// Where queries `[heads, group, count, dim]` lie: strides in elements, rows contiguous.
struct query_layout {
  const void* data = nullptr;  ///< null: none
  index_t count = 0;
  std::ptrdiff_t head = 0, group = 0, row = 0;
  const index_t* position = nullptr;  ///< [count]; null: the prompt's own
  index_t before = 0;                 ///< queries of the same prompt right before these

  /// The same as rows of floats.
  kvmeld::query_view<float> floats() const {
    return {static_cast<const float*>(data), count, head, group, row, position, before};
  }
};

}  // namespace kvmeld_torch
