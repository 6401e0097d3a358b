// SPDX-License-Identifier: MIT
/// The first launch of a step: what either kernel of it reads and writes.
#pragma once

#include <cstdint>  // std::uintptr_t

#include "kvmeld/cuda/memory/work_memory.cuh"
#include "kvmeld/cuda/score/queries.cuh"

namespace kvmeld::cuda {

/// One new token of every head that a call runs.
template <class Scalar>
struct new_tokens {
  const Scalar* keys = nullptr;    ///< [heads, dim]; null: none is appended
  const Scalar* values = nullptr;  ///< [heads, dim]
};

namespace detail {

KVMELD_HD inline float higher_of(float a, float b) { return b > a ? b : a; }
/// exp(x − max), 0 where nothing was seen, NaN where something was NaN.
KVMELD_DEVICE inline float softmax_weight(float x, float max) {
  return x == lowest_score ? 0.0F : exponential(x - max);
}

/// An empty head's output is 0; where the new token had no room, it is NaN.
KVMELD_DEVICE inline float inverse_sum(float sum, bool full) {
  return full ? lowest_score - lowest_score : sum == 0 ? 0.0F : 1.0F / sum;
}

/// The slots of a head that a block attends.
struct slot_share {
  index_t head, split;
  index_t begin, end;
  index_t cached;  ///< slots in the cache; the new token's is the next
  bool full;       ///< there is no room for the new token

  KVMELD_DEVICE bool has_new() const { return begin <= cached && cached < end; }
  KVMELD_DEVICE index_t end_in_cache() const { return cached < end ? cached : end; }
};

template <class Scalar, class Masses>
struct attention_call {
  cache_view<Scalar> cache;
  const row_number<Scalar>* queries;  // [heads, group, dim]
  new_tokens<row_number<Scalar>> fresh;
  partial_attention to;
  row_number<Scalar>* out;  // [heads, group, dim], written where there is one split
  float* log_sum_exp;       // [heads, group], or null; likewise
  Masses masses;

  /// This block's share: whole turns of so many slots. Grid: heads, splits.
  KVMELD_DEVICE slot_share share(index_t turn) const {
    const index_t h = cache.head(), cached = cache.length[h];
    const bool full = fresh.keys != nullptr && cached >= cache.capacity;
    const index_t n = full ? 0 : fresh.keys != nullptr ? cached + 1 : cached;
    const index_t slots = ((n + to.splits - 1) / to.splits + turn - 1) / turn * turn;
    const auto split = block_y();
    const index_t begin = split * slots < n ? split * slots : n;
    return {h, split, begin, begin + slots < n ? begin + slots : n, cached, full};
  }
  KVMELD_DEVICE const row_number<Scalar>* query(index_t g) const {
    return queries + (std::ptrdiff_t{place_of_block()} * cache.group + g) * cache.dim;
  }

  /// Of shared entries a model has no cap.
  template <class Products>
  KVMELD_DEVICE void cap(Products& x) const {
    if constexpr (std::is_same_v<Masses, log_masses>) {
      cap_products(cache, x);
    }
  }

  /// Appends the new token's rows, by a warp of the block that attends it. Its other numbers are
  /// the next launch's.
  KVMELD_DEVICE void append(const slot_share& share, bool aligned) const {
    constexpr index_t width = vector_16<Scalar>::size;
    const index_t h = share.head, n = share.cached;
    const std::ptrdiff_t first = std::ptrdiff_t{place_of_block()} * cache.dim;
    for (index_t i = lane() * width; i < cache.dim; i += 32 * width) {
      store_row(cache.keys.of(h).at(n), i, cache.dim, aligned,
                load_row(fresh.keys + first, i, cache.dim, aligned));
      store_row(cache.values.of(h).at(n), i, cache.dim, aligned,
                load_row(fresh.values + first, i, cache.dim, aligned));
    }
  }

  /// Numbers `i ...` of the new token's row as the cache will hold them.
  KVMELD_DEVICE row_vector<Scalar> rounded_new(const row_number<Scalar>* rows, index_t i) const {
    float x[vector_16<Scalar>::size];
    KVMELD_UNROLL
    for (index_t j = 0; j < vector_16<Scalar>::size; ++j) {
      x[j] = i + j < cache.dim
                 ? to_float(rows[std::ptrdiff_t{place_of_block()} * cache.dim + i + j])
                 : 0.0F;
    }
    return rounded<Scalar>(x);
  }

  /// For the next launch, whatever the workspace held.
  KVMELD_DEVICE void clear_ticket(const slot_share& share, index_t g0) const {
    if (g0 == 0 && share.split == 0 && thread_index() == 0) {
      to.tickets[share.head] = 0;
    }
  }

  /// The block's attention from its warps', in their order, and of the first split the sinks:
  /// maxima and sums `[Warps, Heads]`, Σ e v
  /// `[Warps, Heads, Pitch]`, the first of `Heads` query heads is `g0`. Four dims a thread. Of one
  /// split this is the output.
  template <index_t Warps, index_t Heads, index_t Pitch, index_t Threads = 32 * Warps,
            class Numbers, class Sums>
  KVMELD_DEVICE void combine_warps(Numbers& max, Numbers& sum, Sums& sums, const slot_share& share,
                                   index_t g0) const {
    const index_t heads = cache.group - g0 < Heads ? cache.group - g0 : Heads;
    const index_t quads = (cache.dim + 3) / 4;
    for (index_t e = thread_index(); e < heads * quads; e += Threads) {
      const index_t g = e / quads, i = e % quads * 4;
      const float sink = share.split == 0 ? sink_of(cache, share.head, g0 + g) : lowest_score;
      float top = sink;
      KVMELD_UNROLL
      for (index_t w = 0; w < Warps; ++w) {
        top = higher_of(top, max[w * Heads + g]);
      }
      float total = softmax_weight(sink, top);
      vector_16<float> x;
      KVMELD_UNROLL
      for (index_t w = 0; w < Warps; ++w) {
        const float scale = softmax_weight(max[w * Heads + g], top);
        const auto y = sums.vector((w * Heads + g) * Pitch + i);
        total += scale * sum[w * Heads + g];
        KVMELD_UNROLL
        for (index_t j = 0; j < 4; ++j) {
          x[j] = (w == 0 ? 0.0F : x[j]) + scale * y[j];
        }
      }
      write(share, g0 + g, i, top, total, x);
    }
  }

 private:
  KVMELD_DEVICE void write(const slot_share& share, index_t g, index_t i, float max, float sum,
                           const vector_16<float>& x) const {
    const std::ptrdiff_t part =
        (std::ptrdiff_t{place_of_block()} * to.splits + share.split) * cache.group + g;
    if (i == 0) {
      to.max[part] = max, to.sum[part] = sum;
    }
    if (to.splits > 1) {
      store_16(to.out + part * to.out_pitch(cache.dim) + i, x);
      return;
    }
    const std::ptrdiff_t row = std::ptrdiff_t{place_of_block()} * cache.group + g;
    const float inverse = inverse_sum(sum, share.full);
    KVMELD_UNROLL
    for (index_t j = 0; j < 4; ++j) {
      if (i + j < cache.dim) {
        out[row * cache.dim + i + j] = from_float<row_number<Scalar>>(x[j] * inverse);
      }
    }
    if (i == 0 && log_sum_exp != nullptr) {
      log_sum_exp[row] = max + logarithm(sum);
    }
  }
};

}  // namespace detail

}  // namespace kvmeld::cuda

namespace kvmeld::cuda::detail {

/// A warp attends the new token before all others, and while these are in flight: a tile of its
/// own would keep the block waiting at its end. Registers as the tensor cores deal them: `q` is the
/// right side, `out`, `max` and `sum` are of query heads 2 (lane mod 4) and the next, of each
/// eight.
template <index_t Depth, index_t Eights, class Scalar, class Masses>
KVMELD_DEVICE void attend_new_token(const attention_call<Scalar, Masses>& call,
                                    const slot_share& share, index_t g0,
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
    KVMELD_UNROLL
    for (index_t d = 0; d < Depth / 16; ++d) {
      KVMELD_UNROLL
      for (index_t j = 0; j < 2; ++j) {
        const index_t i = d * 16 + j * 8 + lane() % 4 * 2;
        x += i < call.cache.dim ? dot(q[t][d][j], load_pair(call.fresh.keys + row + i)) : 0.0F;
      }
    }
    x = reduce_sum(x, 4);
    call.cap(x);
    KVMELD_UNROLL
    for (index_t j = 0; j < 2; ++j) {
      const index_t g = g0 + t * 8 + lane() % 4 * 2 + j;
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
  KVMELD_UNROLL
  for (index_t d = 0; d < Depth / 16; ++d) {
    KVMELD_UNROLL
    for (index_t e = 0; e < 2; ++e) {
      const index_t i = d * 16 + lane() / 4 + 8 * e;
      const float v = i < call.cache.dim ? to_float(call.fresh.values[row + i]) : 0.0F;
      KVMELD_UNROLL
      for (index_t t = 0; t < Eights; ++t) {
        out[d][t][2 * e] = weights[t][0] * v, out[d][t][2 * e + 1] = weights[t][1] * v;
      }
    }
  }
}

}  // namespace kvmeld::cuda::detail
