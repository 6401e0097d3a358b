// SPDX-License-Identifier: MIT
/// Parts of `stream_columns` made one, in order.
#pragma once

#include "kvmeld/cuda/score/logit_terms.cuh"
#include "kvmeld/cuda/score/stream_sums.cuh"

namespace kvmeld::cuda::detail {

/// What the prefill's attention left, as other launches take it.
template <class Scalar, class Queries>
struct take_log_sums {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  cache_view<Scalar> cache;
  Queries queries;
  float* log_sum_exp;  // [heads, group, count]

  /// Grid: heads, stretches of `threads` queries of all members.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t all = cache.group * queries.count;
    const index_t i = block_y() * threads + thread_index();
    if (i < all) {
      const index_t g = i / queries.count, place = queries.place();
      const std::ptrdiff_t row =
          (std::ptrdiff_t{place} * cache.group + g) * queries.log_sums_apart();
      log_sum_exp[std::ptrdiff_t{cache.head()} * all + i] =
          queries.has(i % queries.count)
              ? queries.log_sum_exp[row + queries.row_of(i % queries.count)]
              : lowest_score;
    }
  }
};

/// log Σ exp over the parts of every query.
template <class Scalar, class Queries>
struct combine_log_sums {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  cache_view<Scalar> cache;
  Queries queries;
  const float* partial;   // [parts, heads by place, group, count]
  std::ptrdiff_t stride;  // floats, part to part
  index_t parts;
  float* log_sum_exp;

  /// Grid: heads, stretches of `threads` queries of all members.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head(), all = cache.group * queries.count;
    const index_t i = block_y() * threads + thread_index();
    if (i >= all || !queries.asks(h)) {
      return;
    }
    const std::ptrdiff_t at = std::ptrdiff_t{place_of_block()} * all + i;
    float most = lowest_score, sum = 0;
    for (index_t k = 0; k < parts; ++k) {
      const float x = partial[k * stride + at];
      most = x > most ? x : most;
    }
    for (index_t k = 0; k < parts; ++k) {
      const float x = partial[k * stride + at];
      sum += x == lowest_score ? 0.0F : exp2_approx((x - most) * log2_e);
    }
    log_sum_exp[std::ptrdiff_t{h} * all + i] = with_sink(
        cache, h, i / queries.count, sum == 0 ? lowest_score : most + log2_approx(sum) * ln_2);
  }
};

/// The sums of a slot's parts, or the largest of them.
template <class Scalar, class Queries, bool Largest, index_t Numbers>
struct add_parts {
  static constexpr index_t threads = 256;
  struct shared_memory {};

  cache_view<Scalar> cache;
  Queries queries;
  const float* partial;   // [parts, Numbers, heads by place, capacity]
  std::ptrdiff_t stride;  // floats, number to number
  index_t parts;
  float* out[3];

  /// Grid: heads, stretches of `threads` slots.
  KVMELD_DEVICE void operator()(shared_memory&) const {
    const index_t h = cache.head();
    const index_t s = block_y() * threads + thread_index();
    if (s >= cache.length[h] || !queries.asks(h)) {
      return;
    }
    KVMELD_UNROLL
    for (index_t n = 0; n < Numbers; ++n) {
      if (out[n] == nullptr) {
        continue;
      }
      float sum = 0;
      for (index_t k = 0; k < parts; ++k) {
        const float x =
            partial[(std::ptrdiff_t{k} * Numbers + n) * stride + cache.slot(place_of_block(), s)];
        sum = !Largest ? sum + x : x > sum ? x : sum;
      }
      out[n][cache.slot(h, s)] = sum;
    }
  }
};

}  // namespace kvmeld::cuda::detail
