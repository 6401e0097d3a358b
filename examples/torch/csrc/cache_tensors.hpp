/// A cache's tensors, and queries beside them, on the CPU or on a GPU.
#pragma once

#include <cstddef>  // std::ptrdiff_t
#include <cstdint>  // std::int64_t
#include <memory>   // std::shared_ptr

#include "kvmeld/memory/cache.hpp"

namespace kvmeld_torch {

using kvmeld::index_t;

/// Where the numbers of a cache lie. All but keys and values is contiguous.
struct cache_tensors {
  kvmeld::cache_shape shape;
  std::shared_ptr<const kvmeld::attention_spec> spec;  ///< heads point to it
  kvmeld::scalar_type type = kvmeld::scalar_type::float32;
  kvmeld::layout<std::byte> keys, values;  ///< [heads, capacity, dim], strides in bytes
  float* log_mass = nullptr;               ///< [heads, capacity]
  index_t* position = nullptr;             ///< [heads, capacity]
  index_t* length = nullptr;               ///< [heads] slots in use
  index_t* seen = nullptr;                 ///< [heads] tokens ever appended
  float* columns = nullptr;                ///< [heads, column_count, capacity]
  index_t column_count = 0;
  float* memory = nullptr;  ///< [heads, memory_row]: a policy's own, rows of whole cache lines
  std::ptrdiff_t memory_row = 0;
  /// [heads, 3] slots with columns, queries observed, the capacity that `memory` was laid out for
  std::int64_t* measured = nullptr;
};

/// Where queries `[heads, group, count, dim]` lie: strides in elements, rows contiguous.
struct query_layout {
  const void* data = nullptr;  ///< null: none
  index_t count = 0;
  std::ptrdiff_t head = 0, group = 0, row = 0;
  const index_t* position = nullptr;  ///< [count]; null: the prompt's own
  index_t before = 0;                 ///< queries of the same prompt right before these
};

}  // namespace kvmeld_torch
