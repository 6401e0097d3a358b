// SPDX-License-Identifier: MIT
/// What a model's attention has beside `scale · q·k + log-mass`: a soft cap and sinks.
#pragma once

#include <type_traits>  // std::is_array_v

#include "kvmeld/cuda/memory/view.cuh"

namespace kvmeld::cuda::detail {

template <class Scalar, class Products>
KVMELD_DEVICE void cap_each(const cache_view<Scalar>& cache, Products& x) {
  if constexpr (std::is_array_v<Products>) {
    KVMELD_UNROLL
    for (auto& y : x) {
      cap_each(cache, y);
    }
  } else {  // tanh y = 1 − 2 / (e^2y + 1), without a division's call
    const float root = inverse_square_root(exp2_approx(x * cache.soft_cap.in) + 1);
    x = cache.soft_cap.out * (1 - 2 * root * root);
  }
}
/// A product, or an array of them: `scale` times the new one is `cap · tanh(logit / cap)`. One
/// branch for all of them is what a model without a cap pays.
template <class Scalar, class Products>
KVMELD_DEVICE void cap_products(const cache_view<Scalar>& cache, Products& x) {
  if (cache.soft_cap.cap != 0) {
    cap_each(cache, x);
  }
}

/// The logit of a query head's sink, `lowest_score` without one.
template <class Scalar>
KVMELD_DEVICE float sink_of(const cache_view<Scalar>& cache, index_t h, index_t g) {
  return cache.sink_logits == nullptr ? lowest_score
                                      : cache.sink_logits[std::ptrdiff_t{h} * cache.group + g];
}
/// log Σ exp of a query's logits, and of its sink.
template <class Scalar>
KVMELD_DEVICE float with_sink(const cache_view<Scalar>& cache, index_t h, index_t g,
                              float log_sum) {
  const float sink = sink_of(cache, h, g), top = sink > log_sum ? sink : log_sum;
  return sink == lowest_score
             ? log_sum
             : top + logarithm(exponential(log_sum - top) + exponential(sink - top));
}

}  // namespace kvmeld::cuda::detail
