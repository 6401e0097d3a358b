// SPDX-License-Identifier: MIT
/// Carrying out plans: rows, log-mass, positions and columns of all heads, in place.
#pragma once

#include "kvmeld/cuda/merge/apply_records.cuh"
#include "kvmeld/cuda/merge/apply_slices.cuh"

namespace kvmeld::cuda {

namespace detail {

/// Carries out a plan: `apply_slices` for keys and values, and one more block a head for what
/// `apply_records` does.
template <class Scalar, index_t Lanes>
struct apply_rows {
  using slice = apply_slices<Scalar, Lanes>;
  using records = apply_records<Scalar, slice::threads>;
  static constexpr index_t threads = slice::threads, resident = 2;
  struct shared_memory {
    typename slice::shared_memory rows;
    typename records::shared_memory numbers;
  };

  cache_view<Scalar> cache;
  state_view state;
  plan_view plan;
  index_t slices;  // of a row
  bool aligned;

  /// Grid: heads; slices of keys, slices of values, records.
  KVMELD_DEVICE void operator()(shared_memory& shared) const {
    const index_t h = cache.head();
    const auto part = block_y();
    const index_t rows = plan.rows[h];
    if (rows < 0) {
      return;
    }
    const merge_source* const sources = plan.sources + cache.slot(h, 0);
    const index_t* const begin = plan.begin + cache.bound(h, 0);
    const auto take = [&](const plane<Scalar>& x, float merge_source::*weight, const float* delta,
                          index_t of) {
      const index_t i = (of * slice::lanes + thread_index() % slice::lanes) * slice::width;
      slice{{x.of(h), weight, delta == nullptr ? nullptr : delta + cache.slot(h, 0) * cache.dim,
             cache.dim, aligned, rows, begin, sources, i}}(shared.rows);
    };
    if (part == 2 * slices) {
      records{cache, state, plan, h, rows, begin, sources}(shared.numbers);
    } else if (part < slices) {
      take(cache.keys, &merge_source::key_weight, plan.key_correction, part);
    } else {
      take(cache.values, &merge_source::value_weight, plan.value_correction, part - slices);
    }
  }
};

template <index_t Lanes, class Scalar>
void apply_by(const plan_view& plan, const cache_view<Scalar>& cache, const state_view& state,
              stream stream) {
  using kernel = apply_rows<Scalar, Lanes>;
  constexpr index_t width = kernel::slice::lanes * kernel::slice::width;
  const index_t slices = (cache.dim + width - 1) / width;
  launch(kernel{cache, state, plan, slices, cache.aligned()},
         {cache.blocks(), blocks_of(2 * slices + 1)}, stream);
}

}  // namespace detail

/// Makes every head what its plan says, in place and without scratch; lengths too stay on the
/// device. One launch. The plans' laws (`kvmeld::check`) are the maker's duty: nothing here reads
/// them back. Refused on the host: views that do not fit.
template <class Scalar>
void apply(const plan_view& plan, const cache_view<Scalar>& cache, const state_view& state,
           stream stream) {
  check(cache), check(state, cache, 0, 0, "cuda apply"), check(plan, "cuda apply");
  // Memory likes long stretches of rows; few heads take more blocks.
  constexpr index_t wide = 16, row_bytes = wide * 16, enough_heads = 64;
  if (cache.blocks() >= enough_heads &&
      cache.dim * static_cast<index_t>(sizeof(Scalar)) >= row_bytes) {
    detail::apply_by<wide>(plan, cache, state, stream);
  } else {
    detail::apply_by<4>(plan, cache, state, stream);
  }
}

}  // namespace kvmeld::cuda
