// SPDX-License-Identifier: MIT
/// Narrow rows as the numbers that new tokens come in, for plans that read rows many times.
#pragma once

#include "kvmeld/cuda/memory/head_budgets.cuh"
#include "kvmeld/cuda/memory/plan_memory.cuh"

namespace kvmeld::cuda::detail {

/// Where these lie, of caches of narrow rows alone.
struct wide_memory {
  void *keys = nullptr, *values = nullptr;  ///< [heads, capacity, pitch]; the same: keys alone
  index_t* length = nullptr;                ///< [heads] slots of the heads that are due

  /// Rows begin at multiples of 16 bytes.
  KVMELD_HD static index_t wide_pitch_of(index_t dim) { return (dim + 7) / 8 * 8; }
  /// For what reads no values.
  wide_memory of_keys() const { return {keys, keys, length}; }

  void allocate(workspace_allocator& from, const work_shape& shape, bool with_values) {
    if (shape.narrow) {
      const std::size_t bytes = shape.slots() * static_cast<std::size_t>(wide_pitch_of(shape.dim)) *
                                static_cast<std::size_t>(shape.number_bytes);
      keys = from.take<char>(bytes), values = with_values ? from.take<char>(bytes) : keys;
      length = from.take<index_t>(shape.all_heads());
    }
  }
};

/// Rows of the heads that reach their budgets, for `wide_rows`; other heads have no slots.
template <class Scalar>
struct widen_rows {
  using number = row_number<Scalar>;
  static constexpr index_t threads = 256, slots = 64, width = vector_16<number>::size;
  struct shared_memory {};

  cache_view<Scalar> cache;
  cache_view<number> to;
  head_budgets limits;
  bool aligned;

  /// Grid: heads, stretches of `slots`, keys and values.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head(), held = cache.length[h], dim = cache.dim;
    const index_t n = limits.of(h).reached(held) && held <= cache.capacity ? held : 0;
    const auto stretch = block_y(), of_values = block_z();
    if (stretch == 0 && of_values == 0 && thread_index() == 0) {
      to.length[h] = n;
    }
    const auto from = (of_values == 0 ? cache.keys : cache.values).of(h);
    const auto rows = (of_values == 0 ? to.keys : to.values).of(h);
    const index_t packs = (dim + width - 1) / width;
    for (index_t e = thread_index(); e < slots * packs; e += threads) {
      const index_t s = stretch * slots + e / packs, i = e % packs * width;
      if (s < n) {
        store_row(rows.at(s), i, dim, true, load_as<number>(from.at(s), i, dim, aligned));
      }
    }
  }
};

/// A cache for plans of the heads that reach their budgets: rows are `row_number`s, to which codes
/// of q8_0 are rounded if these are of 16 bits; numbers of fp8 are exact. Of other rows it is
/// `cache`. Plans are carried out on that. One launch, or none.
template <class Scalar>
cache_view<row_number<Scalar>> wide_rows(const cache_view<Scalar>& cache,
                                         [[maybe_unused]] const head_budgets& limits,
                                         [[maybe_unused]] const wide_memory& work,
                                         [[maybe_unused]] stream stream) {
  if constexpr (!narrow_rows<Scalar>) {
    return cache;
  } else {
    const index_t pitch = wide_memory::wide_pitch_of(cache.dim);
    const auto plane_at = [&](void* data) {
      return plane<row_number<Scalar>>{static_cast<row_number<Scalar>*>(data),
                                       std::ptrdiff_t{cache.capacity} * pitch, pitch};
    };
    const cache_view<row_number<Scalar>> to{
        plane_at(work.keys), plane_at(work.values), cache.log_mass, cache.position,
        work.length,         cache.next_position,   cache.heads,    cache.capacity,
        cache.dim,           cache.group,           cache.scale,    cache.spec,
        cache.active,        cache.active_count,    cache.stride(), cache.soft_cap,
        cache.sink_logits};
    using widen = widen_rows<Scalar>;
    launch(widen{cache, to, limits, cache.aligned()},
           {cache.blocks(), blocks_of(cache.capacity, widen::slots),
            work.values == work.keys ? 1U : 2U},
           stream);
    return to;
  }
}

}  // namespace kvmeld::cuda::detail
