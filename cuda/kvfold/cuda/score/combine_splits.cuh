/// A head's softmax from that of its splits.
#pragma once

#include "kvfold/cuda/score/attention_call.cuh"

namespace kvfold::cuda::detail {

/// What a block knows of it then.
struct combined_splits {
  shared_array<float, most_splits * max_group> scale;  // of each split's output
  shared_array<float, max_group> max, inverse;         // of the logits; of the sum
};

template <class Scalar, index_t Threads>
struct combine_splits {
  cache_view<Scalar> cache;
  partial_attention from;
  Scalar* out;         // [heads, group, dim]
  float* log_sum_exp;  // [heads, group], or null

  /// Maxima and sums of all splits; where these are several, output and log-sum-exp, weighted in a
  /// fixed order, four dims a thread. By one of the head's `from.tiles` blocks, with a barrier.
  KVFOLD_DEVICE void operator()(combined_splits& shared, index_t h, index_t tile, bool full) const {
    const std::ptrdiff_t parts = std::ptrdiff_t{h} * from.splits * cache.group;
    const index_t quads = (cache.dim + 3) / 4;
    const index_t all = from.splits > 1 ? cache.group * quads : 0;
    KVFOLD_ROLLED
    for (index_t g = warp(); g < cache.group; g += Threads / 32) {
      float max = lowest_score, sum = 0;
      KVFOLD_ROLLED
      for (index_t p = lane(); p < from.splits; p += 32) {
        max = higher_of(max, from.max[parts + p * cache.group + g]);
      }
      max = reduce_max(max);
      KVFOLD_ROLLED
      for (index_t p = lane(); p < from.splits; p += 32) {
        const float scale = softmax_weight(from.max[parts + p * cache.group + g], max);
        shared.scale[p * max_group + g] = scale;
        sum += scale * from.sum[parts + p * cache.group + g];
      }
      sum = reduce_sum(sum);
      if (lane() == 0) {
        shared.max[g] = max, shared.inverse[g] = inverse_sum(sum, full);
        if (tile == 0 && from.splits > 1 && log_sum_exp != nullptr) {
          log_sum_exp[std::ptrdiff_t{place_of_block()} * cache.group + g] = max + logarithm(sum);
        }
      }
    }
    sync_block();
    KVFOLD_ROLLED
    for (index_t e = tile * Threads + thread_index(); e < all; e += from.tiles * Threads) {
      const index_t g = e / quads, i = e % quads * 4;
      vector_16<float> x;
      KVFOLD_UNROLL
      for (index_t j = 0; j < 4; ++j) {
        x[j] = 0;
      }
      for (index_t p = 0; p < from.splits; ++p) {
        const std::ptrdiff_t part = parts + p * cache.group + g;
        const auto y = load_row(from.out + part * cache.dim, i, cache.dim, cache.dim % 4 == 0);
        const float scale = shared.scale[p * max_group + g];
        KVFOLD_UNROLL
        for (index_t j = 0; j < 4; ++j) {
          x[j] += scale * y[j];
        }
      }
      const std::ptrdiff_t row = std::ptrdiff_t{place_of_block()} * cache.group + g;
      const float inverse = shared.inverse[g];
      KVFOLD_UNROLL
      for (index_t j = 0; j < 4; ++j) {
        if (i + j < cache.dim) {
          out[row * cache.dim + i + j] = from_float<Scalar>(x[j] * inverse);
        }
      }
    }
  }
};

}  // namespace kvfold::cuda::detail
