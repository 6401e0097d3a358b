// SPDX-License-Identifier: MIT
/// Carrying out plans: rows, log-mass, positions and columns of all heads, in place.
#pragma once

#include <type_traits>  // std::conditional_t

#include "kvmeld/cuda/merge/apply_records.cuh"
#include "kvmeld/cuda/merge/apply_slices.cuh"
#include "kvmeld/cuda/merge/float_rows.cuh"

namespace kvmeld::cuda {

namespace detail {

/// Narrow rows that are made of several slots, or weighted, into their anchors' slots, which no
/// other row reads. A warp a row.
template <class Scalar>
struct merge_blocks {
  static constexpr index_t threads = 256, warps = threads / 32, width = vector_16<Scalar>::size;
  static constexpr index_t resident = 3;
  struct shared_memory {};

  cache_view<Scalar> cache;
  plan_view plan;
  bool aligned;

  /// Grid: heads; shares of their rows.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head(), step = grid_y() * warps;
    for (index_t r = block_y() * warps + warp(); r < plan.rows[h]; r += step) {
      merge(cache.keys.of(h), &merge_source::key_weight, plan.key_correction, h, r);
      merge(cache.values.of(h), &merge_source::value_weight, plan.value_correction, h, r);
    }
  }

 private:
  KVMELD_DEVICE void merge(const head_rows<Scalar>& x, float merge_source::*weight,
                           const float* delta, index_t h, index_t r) const {
    const index_t* const begin = plan.begin + cache.bound(h, r);
    const merge_source* const e = plan.sources + cache.slot(h, begin[0]);
    const merge_source* const end = plan.sources + cache.slot(h, begin[1]);
    const index_t i = lane() * width;
    float sum[width];
    bool corrected = false;
    KVMELD_UNROLL
    for (index_t j = 0; j < width; ++j) {
      sum[j] = delta != nullptr && i + j < cache.dim ? delta[cache.slot(h, r) * cache.dim + i + j]
                                                     : 0.0F;
      corrected = corrected || sum[j] != 0;
    }
    // What stays as it is keeps its codes, which others than ours may have rounded.
    if (end - e == 1 && e->*weight == 1.0F && ballot(corrected) == 0) {
      return;
    }
    add_sources<2>(x, weight, e, end, i, cache.dim, aligned, sum);
    store_row(x.at(e->source), i, cache.dim, aligned, rounded_sum<Scalar>(sum));
  }
};

/// Elements that rows are moved by: narrow ones by bytes.
template <class Scalar>
using moved_element = std::conditional_t<narrow_rows<Scalar>, std::int8_t, Scalar>;
template <class Scalar>
KVMELD_DEVICE auto moved_rows(const head_rows<Scalar>& x) {
  using moved = moved_element<Scalar>;
  return head_rows<moved>{reinterpret_cast<moved*>(x.data), x.row, x.page, x.table, x.pages};
}

/// Carries out a plan: `apply_slices` for keys and values, and one more block a head for what
/// `apply_records` does.
template <class Scalar, index_t Lanes>
struct apply_rows {
  using moved = moved_element<Scalar>;
  using slice = apply_slices<moved, Lanes>;
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
      slice{{moved_rows(x.of(h)), weight,
             delta == nullptr ? nullptr : delta + cache.slot(h, 0) * cache.dim,
             row_elements<Scalar>(cache.dim), aligned, rows, begin, sources, i}}(shared.rows);
    };
    if (part == 2 * slices) {
      records{cache, state, plan, h, rows, begin, sources}(shared.numbers);
    } else if (part < slices) {
      take(cache.keys, &merge_source::key_weight, slice::merges ? plan.key_correction : nullptr,
           part);
    } else {
      take(cache.values, &merge_source::value_weight,
           slice::merges ? plan.value_correction : nullptr, part - slices);
    }
  }
};

template <index_t Lanes, class Scalar>
void apply_by(const plan_view& plan, const cache_view<Scalar>& cache, const state_view& state,
              stream stream) {
  using kernel = apply_rows<Scalar, Lanes>;
  constexpr index_t width = kernel::slice::lanes * kernel::slice::width;
  const index_t slices = (row_elements<Scalar>(cache.dim) + width - 1) / width;
  launch(kernel{cache, state, plan, slices, cache.aligned()},
         {cache.blocks(), blocks_of(2 * slices + 1)}, stream);
}

/// Narrow rows first: `apply_by` moves their bytes alone.
template <class Scalar>
void merge_narrow(const plan_view& plan, const cache_view<Scalar>& cache, stream stream) {
  if constexpr (narrow_rows<Scalar>) {
    using merge = merge_blocks<Scalar>;
    launch(merge{cache, plan, cache.aligned()},
           {cache.blocks(), blocks_of(cache.capacity, 8 * merge::warps)}, stream);
  }
}

/// `apply` of a plan that is checked; narrow rows have merged already.
template <class Scalar>
void apply_merged(const plan_view& plan, const cache_view<Scalar>& cache, const state_view& state,
                  stream stream) {
  // Memory likes long stretches of rows; few heads take more blocks.
  constexpr index_t wide = 16, row_bytes = wide * 16, enough_heads = 64;
  if (cache.blocks() >= enough_heads &&
      cache.dim * static_cast<index_t>(sizeof(Scalar)) >= row_bytes) {
    apply_by<wide>(plan, cache, state, stream);
  } else {
    apply_by<4>(plan, cache, state, stream);
  }
}

}  // namespace detail

/// Makes every head what its plan says, in place and without scratch; lengths too stay on the
/// device. One launch, of narrow rows two. The plans' laws (`kvmeld::check`) are the maker's duty:
/// nothing here reads them back. Refused on the host: views that do not fit.
template <class Scalar>
void apply(const plan_view& plan, const cache_view<Scalar>& cache, const state_view& state,
           stream stream) {
  check(cache), check(state, cache, 0, 0, "cuda apply"), check(plan, "cuda apply");
  detail::merge_narrow(plan, cache, stream);
  detail::apply_merged(plan, cache, state, stream);
}

}  // namespace kvmeld::cuda
