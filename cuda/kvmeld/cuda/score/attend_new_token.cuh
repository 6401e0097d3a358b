// SPDX-License-Identifier: MIT
/// The new token's part of a step's attention on tensor cores.
#pragma once

#include "kvmeld/cuda/score/attention_call.cuh"

namespace kvmeld::cuda::detail {

/// A warp attends the new token before all others, and while these are in flight: a tile of its
/// own would keep the block waiting at its end. Registers as the tensor cores deal them: `q` is the
/// right side, `out`, `max` and `sum` are of query heads 2 (lane mod 4) and the next, of each
/// eight.
template <index_t Depth, index_t Eights, class Scalar, class Masses>
KVMELD_DEVICE void attend_new_token(const attention_call<Scalar, Masses>& call,
                                    const slot_share& share,
                                    const unsigned (&q)[Eights][Depth / 16][2],
                                    float (&out)[Depth / 16][Eights][4], float (&max)[Eights][2],
                                    float (&sum)[Eights][2]) {
  const std::ptrdiff_t row = std::ptrdiff_t{place_of_block()} * call.cache.dim;
  const auto dot = [](unsigned a, unsigned b) {
    return to_float(low_of<Scalar>(a)) * to_float(low_of<Scalar>(b)) +
           to_float(high_of<Scalar>(a)) * to_float(high_of<Scalar>(b));
  };
  float weights[Eights][2];
  KVMELD_UNROLL
  for (index_t t = 0; t < Eights; ++t) {
    float x = 0;  // of query head lane / 4
    unrolled<Depth / 16, 2>([&](index_t d, index_t j) {
      const index_t i = d * 16 + j * 8 + lane() % 4 * 2;
      x += i < call.cache.dim ? dot(q[t][d][j], load_pair(call.fresh.keys + row + i)) : 0.0F;
    });
    x = reduce_sum(x, 4);
    KVMELD_UNROLL
    for (index_t j = 0; j < 2; ++j) {
      const index_t g = t * 8 + lane() % 4 * 2 + j;
      float observed = 0;
      const float logit =
          call.masses(call.cache, share.head, share.cached, shuffle(x, g % 8 * 4), 0.0F, observed);
      if (call.to.logits != nullptr && lane() < 4 && g < call.cache.group) {
        call.to.logits_of(call.cache, share.cached)[g] = observed;
      }
      max[t][j] = higher_of(lowest_score, logit);
      weights[t][j] = softmax_weight(logit, max[t][j]);
      sum[t][j] = lane() < 4 ? weights[t][j] : 0.0F;
    }
  }
  unrolled<Depth / 16, 2>([&](index_t d, index_t e) {
    const index_t i = d * 16 + lane() / 4 + 8 * e;
    const float v = i < call.cache.dim ? to_float(call.fresh.values[row + i]) : 0.0F;
    KVMELD_UNROLL
    for (index_t t = 0; t < Eights; ++t) {
      out[d][t][2 * e] = weights[t][0] * v, out[d][t][2 * e + 1] = weights[t][1] * v;
    }
  });
}

}  // namespace kvmeld::cuda::detail
