// SPDX-License-Identifier: MIT
/// A head's softmax from that of its splits.
#pragma once

#include "kvmeld/cuda/score/attention_call.cuh"

namespace kvmeld::cuda::detail {

/// What a block knows of it then, of so many splits of 16 query heads, or fewer of more
/// (`most_splits_of`): each split's weight in the output; from the end on, maxima of the logits and
/// inverses of the sums.
template <index_t Splits>
struct combined_splits {
  static constexpr index_t size = group_block * (Splits + 2);
  shared_array<float, size> numbers;

  KVMELD_DEVICE decltype(auto) scale(index_t splits, index_t g, index_t p) {
    return numbers[g * splits + p];
  }
  KVMELD_DEVICE decltype(auto) max(index_t g) { return numbers[size - 2 - 2 * g]; }
  KVMELD_DEVICE decltype(auto) inverse(index_t g) { return numbers[size - 1 - 2 * g]; }
};

/// `AtOnce`: so many splits' outputs are in flight to a thread.
template <class Scalar, index_t Threads, index_t AtOnce>
struct combine_splits {
  cache_view<Scalar> cache;
  partial_attention from;
  row_number<Scalar>* out;  // [heads, group, dim]
  float* log_sum_exp;       // [heads, group], or null

  /// Maxima and sums of all splits, and where these are several the log-sum-exp. By one of the
  /// head's `from.tiles` blocks, with a barrier.
  template <index_t Splits>
  KVMELD_DEVICE void weigh(combined_splits<Splits>& shared, index_t tile, bool full) const {
    const std::ptrdiff_t parts = std::ptrdiff_t{place_of_block()} * from.splits * cache.group;
    KVMELD_ROLLED
    for (index_t g = warp(); g < cache.group; g += Threads / 32) {
      // Of the lane's splits, then of all: their numbers are asked for once.
      float most = lowest_score, sum = 0;
      KVMELD_ROLLED
      for (index_t p = lane(); p < from.splits; p += 32) {
        const float max = from.max[parts + p * cache.group + g];
        const float its = from.sum[parts + p * cache.group + g];
        const float top = higher_of(most, max);
        sum = sum * softmax_weight(most, top) + its * softmax_weight(max, top), most = top;
        shared.scale(from.splits, g, p) = max;
      }
      const float max = reduce_max(most);
      sum = reduce_sum(sum * softmax_weight(most, max));
      KVMELD_ROLLED
      for (index_t p = lane(); p < from.splits; p += 32) {
        const float its = shared.scale(from.splits, g, p);
        shared.scale(from.splits, g, p) = softmax_weight(its, max);
      }
      if (lane() == 0) {
        shared.max(g) = max, shared.inverse(g) = inverse_sum(sum, full);
        if (tile == 0 && from.splits > 1 && log_sum_exp != nullptr) {
          log_sum_exp[std::ptrdiff_t{place_of_block()} * cache.group + g] = max + logarithm(sum);
        }
      }
    }
    sync_block();
  }

  /// Where splits are several: the output, theirs weighted in a fixed order, four dims a thread.
  template <index_t Splits>
  KVMELD_DEVICE void write_output(combined_splits<Splits>& shared, index_t tile) const {
    const std::ptrdiff_t parts = std::ptrdiff_t{place_of_block()} * from.splits * cache.group;
    const index_t pitch = from.out_pitch(cache.dim), quads = pitch / 4;
    const index_t all = from.splits > 1 ? cache.group * quads : 0;
    KVMELD_ROLLED
    for (index_t e = tile * Threads + thread_index(); e < all; e += from.tiles * Threads) {
      const index_t g = e / quads, i = e % quads * 4;
      vector_16<float> x;
      KVMELD_UNROLL
      for (index_t j = 0; j < 4; ++j) {
        x[j] = 0;
      }
      constexpr index_t many = Splits < AtOnce ? Splits : AtOnce;
      KVMELD_ROLLED
      for (index_t first = 0; first < from.splits; first += many) {
        vector_16<float> y[many];
        KVMELD_UNROLL
        for (index_t u = 0; u < many; ++u) {
          if (first + u < from.splits) {
            y[u] = load_16(from.out + (parts + (first + u) * cache.group + g) * pitch + i);
          }
        }
        KVMELD_UNROLL
        for (index_t u = 0; u < many; ++u) {
          if (first + u < from.splits) {
            const float scale = shared.scale(from.splits, g, first + u);
            KVMELD_UNROLL
            for (index_t j = 0; j < 4; ++j) {
              x[j] += scale * y[u][j];
            }
          }
        }
      }
      const std::ptrdiff_t row = std::ptrdiff_t{place_of_block()} * cache.group + g;
      const float inverse = shared.inverse(g);
      KVMELD_UNROLL
      for (index_t j = 0; j < 4; ++j) {
        if (i + j < cache.dim) {
          out[row * cache.dim + i + j] = from_float<row_number<Scalar>>(x[j] * inverse);
        }
      }
    }
  }
};

}  // namespace kvmeld::cuda::detail
